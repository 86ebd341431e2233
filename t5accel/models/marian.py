"""Marian, of which the OPUS-MT models are: sinusoids for positions, a bias of the logits, and a pad never to be said.

It starts with its padding token, so that one must not come out again. Source and target may have vocabularies of their
own, with an embedding each.
"""

from t5accel.models.families import Family

FAMILY = Family(
    "marian", "MarianMTModel",
    sizes={"opus-mt": dict(
        vocab_size=58101, d_model=512, encoder_layers=6, decoder_layers=6, encoder_attention_heads=8,
        decoder_attention_heads=8, encoder_ffn_dim=2048, decoder_ffn_dim=2048, activation_function="swish",
        scale_embedding=True, max_position_embeddings=512, pad_token_id=58100, eos_token_id=0,
        decoder_start_token_id=58100,
    )},
    generation=dict(forced_eos_token_id="eos", bad_words_ids="pads"),
)  # fmt: skip
