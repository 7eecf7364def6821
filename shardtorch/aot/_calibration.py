"""How far the compiler's estimates are from published step times."""

EFFICIENCY = {"v6e": 1.195}
"""By chip generation: what predicted times are divided by, as `python benchmarks/calibrate.py --fit` found it with
libtpu 0.0.40 on every second published row. docs/planning.md says what it holds."""


def efficiency_of(generation: str) -> tuple[float, str]:
    """What predicted times of a generation are divided by, and of which one it was fitted.

    The others have too few published rows to fit. The estimates are the same compiler's, so v6e's factor is theirs too:
    it takes the error on the one row of v5p from 19 % to less than 1 %.
    """
    fitted = generation if generation in EFFICIENCY else "v6e"
    return EFFICIENCY[fitted], fitted
