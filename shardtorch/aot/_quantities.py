"""How sizes, times and rates read, in the terminal and on the page."""

_SECONDS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns"))
_BYTES = tuple(
    (2.0**exponent, unit) for exponent, unit in ((40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB"), (0, "B"))
)
_DECIMAL = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""))


def bytes_text(num_bytes: float) -> str:
    """Bytes to three digits, in powers of 1024.

    >>> bytes_text(95 * 2**30), bytes_text(-1536), bytes_text(0), bytes_text(2**30 - 1)
    ('95.0 GiB', '-1.50 KiB', '0 B', '1.00 GiB')
    """
    return _scaled(num_bytes, _BYTES, smallest="B")


def seconds_text(seconds: float) -> str:
    """A time to three digits.

    >>> seconds_text(1.947), seconds_text(0.0123), seconds_text(0.0), seconds_text(250.0)
    ('1.95 s', '12.3 ms', '0 s', '250 s')
    """
    return _scaled(seconds, _SECONDS, smallest="s")


def rate_text(rate: float, unit: str) -> str:
    """A rate to three digits, in powers of 1000.

    >>> rate_text(4.59e14, "FLOP/s"), rate_text(2.765e12, "B/s")
    ('459 TFLOP/s', '2.77 TB/s')
    """
    return _scaled(rate, tuple((scale, prefix + unit) for scale, prefix in _DECIMAL), smallest=unit)


def share_text(part: float, whole: float) -> str:
    """A share in percent; empty if there is no whole.

    >>> share_text(1, 8), share_text(0.0001, 1), share_text(0, 1), share_text(1, 0)
    ('12.5 %', '<0.1 %', '0 %', '')
    """
    if not whole:
        return ""
    percent = 100 * part / whole
    if not percent:
        return "0 %"
    return f"{percent:.1f} %" if abs(percent) >= 0.1 else "<0.1 %"


def _scaled(value: float, units: tuple[tuple[float, str], ...], *, smallest: str) -> str:
    if not value:
        return f"0 {smallest}"
    # A value that rounds to the next unit takes it: 1.00 s rather than 1000 ms.
    scale, unit = next((choice for choice in units if abs(value) >= 0.9995 * choice[0]), units[-1])
    scaled = value / scale
    decimals = 2 if abs(scaled) < 9.995 else 1 if abs(scaled) < 99.95 else 0
    return f"{scaled:,.{0 if unit == 'B' else decimals}f} {unit}"
