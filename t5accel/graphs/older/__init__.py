"""The layouts of the past, written to be compared with ours."""
