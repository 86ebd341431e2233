"""T5 and what is shaped like it: FLAN, mT5, UMT5, ByT5, MADLAD-400. Distances in the scores, no bias anywhere.

Their sizes, and seeded random models of them, are in `t5accel.models`.
"""

from t5accel.models.families import Family

T5 = Family(
    "t5", "T5ForConditionalGeneration",
    norm="rms", norm_first=True, position_offset=None, biases=False, scales_attention=False, scales_embedding=False,
    head_bias=False,
)  # fmt: skip
