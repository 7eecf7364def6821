"""How far the compiler's estimates are from published step times."""

EFFICIENCY: dict[str, float] = {}
"""By chip generation: what predicted times are divided by."""
