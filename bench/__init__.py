"""How we measure: in a checkout of the repository only."""
