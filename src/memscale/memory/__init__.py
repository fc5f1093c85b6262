"""How much memory is in use, and how much was at most."""
