"""Generate for every row of a file or folder."""
