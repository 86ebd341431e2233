"""Several ways of answering, side by side on one page."""
