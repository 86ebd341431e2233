"""Backends for the layouts of the past."""
