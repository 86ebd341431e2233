"""Slower layouts and systems to compare with."""
