"""Load, fuzz and compare servers."""
