"""What sets families of encoder-decoders apart: one small description each, which the graphs' builder reads."""
