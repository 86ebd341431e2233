"""How the bundled models were made; never in the wheel."""
