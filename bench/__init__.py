"""How this repository measures; never in the wheel."""
