"""Weights of a mixture as integers."""

from collections.abc import Sequence
from decimal import Decimal
from math import gcd

MAX_TOTAL_WEIGHT = 2**31
"""Largest sum of integer weights: a product of two of them stays within 64 bits."""


def integer_weights(weights: Sequence[float]) -> tuple[int, ...]:
    """The smallest integers in proportion to these, taken as the decimals that were written: 0.7 and 0.3 are 7:3."""
    decimals = [Decimal(repr(weight)).normalize() for weight in weights]
    digits = max(0, *(-int(decimal.as_tuple().exponent) for decimal in decimals))
    integers = [int(decimal.scaleb(digits)) for decimal in decimals]
    return tuple(weight // gcd(*integers) for weight in integers)
