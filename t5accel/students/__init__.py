"""Distil and prune any T5 on examples of your own."""
