"""A BERT reader, accelerated by the same steps."""
