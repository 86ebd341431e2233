"""From texts to tokens and back: the pipeline, the tokenizer's file, and its algorithm in plain Python."""
