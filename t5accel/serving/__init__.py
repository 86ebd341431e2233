"""Requests that share one running batch, and the server in front of it."""
