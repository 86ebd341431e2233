"""What `advise` is made of: the need, the measured rows as evidence, and how the advice reads."""
