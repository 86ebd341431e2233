"""Train a smaller student, or prune a model."""
