"""Numbers as people read them; a missing value is an em dash, never a zero."""

from itertools import pairwise
from math import floor, isfinite, log10
from pathlib import Path

from danlu.spec.byte_format import format_bytes

MISSING = "—"


def count(value: float | None) -> str:
    """`1234567` as `1.23M`."""
    if value is None or not isfinite(value):
        return MISSING
    for scale, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        # a value that rounds up to the next unit is written in that unit: 999,950 is 1M
        if abs(value) >= scale * 0.9995:
            return f"{_three_digits(value / scale)}{unit}"
    return _three_digits(value)


def _three_digits(value: float) -> str:
    """Three significant digits, no exponent, no trailing zeros."""
    if value == 0:
        return "0"
    decimals = max(0, 2 - floor(log10(abs(value))))
    text = f"{value:.{decimals}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def loss(value: float | None) -> str:
    """Four decimals below 10, three above: the differences that a curve can still show."""
    if value is None or not isfinite(value):
        return MISSING
    return f"{value:.4f}" if abs(value) < 10 else f"{value:.3f}"


def number(value: float | None) -> str:
    """Four significant digits, with an exponent where that is shorter."""
    return MISSING if value is None or not isfinite(value) else f"{value:.4g}"


def scientific(value: float | None) -> str:
    """A learning rate: `0.0003` as `3e-4`."""
    if value is None or not isfinite(value):
        return MISSING
    if value == 0:
        return "0"
    mantissa, exponent = f"{value:.2e}".split("e")
    return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"


def size(value: float | None) -> str:
    """Bytes in decimal units: `34.1 GB`."""
    return MISSING if value is None else format_bytes(value)


def round_size(value: float) -> str:
    """A round size without decimals: `80 GB`."""
    return format_bytes(value).replace(".0 ", " ")


def flop_rate(value: float | None) -> str:
    """FLOP/s in decimal units: `2.49 PFLOP/s`."""
    return MISSING if value is None else f"{flop_count(value)}/s"


def flop_count(value: float) -> str:
    """FLOPs in decimal units: `2.49 PFLOP`."""
    for scale, unit in ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M")):
        if value >= scale:
            return f"{_three_digits(value / scale)} {unit}FLOP"
    return f"{_three_digits(value)} FLOP"


def percent(share: float | None) -> str:
    """A fraction as `41.2 %`; small ones keep a second decimal."""
    if share is None:
        return MISSING
    return f"{share:.1%}".replace("%", " %") if share >= 0.1 or share == 0 else f"{share:.2%}".replace("%", " %")


def duration(seconds: float | None) -> str:
    """The two largest units: `3 h 12 min`."""
    if seconds is None:
        return MISSING
    if seconds < 10:
        return f"{seconds:.1f} s"
    rounded = round(seconds)
    for scale, unit, below, lesser in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if rounded >= scale:
            rest = rounded % scale // below
            return f"{rounded // scale} {unit} {rest} {lesser}" if rest else f"{rounded // scale} {unit}"
    return f"{rounded} s"


def relative_path(path: Path) -> Path:
    """A path relative to the working directory, if it is inside."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


_BARS = "▁▂▃▄▅▆▇█"


def sparkline(values: list[float], width: int = 12) -> str:
    """A curve in `width` characters: the mean of every piece, scaled from the lowest to the highest."""
    finite = [value for value in values if isfinite(value)]
    if not finite:
        return ""
    width = min(width, len(finite))
    edges = [round(piece * len(finite) / width) for piece in range(width + 1)]
    means = [sum(finite[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, span = min(means), max(means) - min(means)
    if span == 0:
        return _BARS[0] * width
    return "".join(_BARS[round((mean - low) / span * (len(_BARS) - 1))] for mean in means)
