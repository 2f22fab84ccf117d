"""Weights of a mixture as whole numbers."""

from collections.abc import Sequence
from decimal import Decimal
from math import gcd

LARGEST_TOTAL = 2**31
"""Most that whole weights may sum up to: a product of two of them stays within 64 bits."""


def whole_weights(weights: Sequence[float]) -> tuple[int, ...]:
    """The smallest whole numbers in proportion to these, taken as the decimals a person wrote: 0.7 and 0.3 are 7:3."""
    decimals = [Decimal(repr(weight)).normalize() for weight in weights]
    digits = max(0, *(-int(decimal.as_tuple().exponent) for decimal in decimals))
    whole = [int(decimal.scaleb(digits)) for decimal in decimals]
    return tuple(weight // gcd(*whole) for weight in whole)
