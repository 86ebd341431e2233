"""BART (Lewis et al. 2019): learned positions, of which the first two rows are never used; norms behind the parts."""

from t5accel.models.families import Family

_BASE = dict(
    vocab_size=50265, d_model=768, encoder_layers=6, decoder_layers=6, encoder_attention_heads=12,
    decoder_attention_heads=12, encoder_ffn_dim=3072, decoder_ffn_dim=3072,
)  # fmt: skip
_LARGE = dict(
    vocab_size=50265, d_model=1024, encoder_layers=12, decoder_layers=12, encoder_attention_heads=16,
    decoder_attention_heads=16, encoder_ffn_dim=4096, decoder_ffn_dim=4096,
)  # fmt: skip

FAMILY = Family(
    "bart", "BartForConditionalGeneration", norm_embedding=True, position_offset=2,
    sizes={"bart-base": _BASE, "bart-large": _LARGE, "distilbart-12-6": dict(_LARGE, decoder_layers=6)},
    generation=dict(forced_eos_token_id="eos"),
)  # fmt: skip
