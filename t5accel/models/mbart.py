"""mBART (Liu et al. 2020) and mBART-50: BART's positions, norms in front, and the target's language as first token."""

from t5accel.models.families import Family

FAMILY = Family(
    "mbart", "MBartForConditionalGeneration", norm_first=True, norm_embedding=True, position_offset=2,
    sizes={"mbart-large-50": dict(
        vocab_size=250054, d_model=1024, encoder_layers=12, decoder_layers=12, encoder_attention_heads=16,
        decoder_attention_heads=16, encoder_ffn_dim=4096, decoder_ffn_dim=4096, activation_function="relu",
        scale_embedding=True, decoder_start_token_id=2,
    )},
    generation=dict(forced_eos_token_id="eos"),
)  # fmt: skip
