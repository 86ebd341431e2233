"""Make or shrink a model: training data, vocabulary, training."""
