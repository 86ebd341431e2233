"""M2M-100 and NLLB-200: sinusoids that count real tokens only, norms in front, heads of up to 256 thousand rows.

The target's language is the first token that the decoder writes: ``forced_bos_token_id``, given with each call.
"""

from t5accel.models.families import Family

_LARGE = dict(
    d_model=1024, encoder_layers=12, decoder_layers=12, encoder_attention_heads=16, decoder_attention_heads=16,
    encoder_ffn_dim=4096, decoder_ffn_dim=4096, activation_function="relu", scale_embedding=True,
)  # fmt: skip

FAMILY = Family(
    "m2m_100", "M2M100ForConditionalGeneration",
    norm_first=True, position_offset=1, skips_padding=True, head_bias=False,
    sizes={
        "nllb-200-distilled-600M": dict(_LARGE, vocab_size=256206),
        "m2m100_418M": dict(_LARGE, vocab_size=128112),
    },
)  # fmt: skip
