"""How the bundled models were made: in a checkout of the repository only."""
