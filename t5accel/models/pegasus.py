"""Pegasus (Zhang et al. 2020): sinusoids for positions, norms in front."""

from t5accel.models.families import Family

_LARGE = dict(
    vocab_size=96103, d_model=1024, encoder_layers=16, decoder_layers=16, encoder_attention_heads=16,
    decoder_attention_heads=16, encoder_ffn_dim=4096, decoder_ffn_dim=4096, activation_function="relu",
    scale_embedding=True,
)  # fmt: skip

FAMILY = Family(
    "pegasus", "PegasusForConditionalGeneration", norm_first=True,
    sizes={"pegasus-large": _LARGE, "pegasus-xsum": dict(_LARGE, max_position_embeddings=512)},
    generation=dict(forced_eos_token_id="eos"),
)  # fmt: skip
