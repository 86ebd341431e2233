"""How the bundled models are made: their texts, vocabulary, curricula and training."""
