"""One program per file of data/results/."""
