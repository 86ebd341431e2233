"""Templates and phrases of the training texts."""
