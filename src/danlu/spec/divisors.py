"""The valid number closest to a wrong one, for suggestions."""

from collections.abc import Callable, Iterable


def divisors(number: int) -> list[int]:
    """Every divisor, in order."""
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def closest(wrong: int, valid: Iterable[int]) -> int | None:
    """The valid number closest to `wrong`, the larger of two; None if there is none."""
    return min(valid, key=lambda number: (abs(number - wrong), -number), default=None)


def closest_divisor(wrong: int, number: int, also: Callable[[int], bool] = lambda divisor: True) -> int | None:
    """The divisor of `number` closest to `wrong` for which `also` is true."""
    return closest(wrong, filter(also, divisors(number)))


def closest_multiple(wrong: int, number: int) -> int:
    """The multiple of `number`, not 0, closest to `wrong`."""
    below = wrong // number * number
    return closest(wrong, [multiple for multiple in (below, below + number) if multiple]) or number
