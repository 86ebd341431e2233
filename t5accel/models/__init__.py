"""Load and describe encoder-decoder models; their mathematics and families."""
