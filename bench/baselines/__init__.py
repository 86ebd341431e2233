"""Slower layouts and techniques to compare with."""
