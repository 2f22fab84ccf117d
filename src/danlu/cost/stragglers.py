"""What slow chips cost: a step waits for the slowest one, unless its stage has time to spare.

Chips of one kind differ by 8 % from one end to the other, up to 22 % (Sinha et al., "Not all GPUs are created equal",
SC 2022), which is a standard deviation of some 2 %. Of ranks that share cores `danlu probe` measures it.
"""

from collections.abc import Sequence
from math import log, sqrt


def straggling(slots: Sequence[float], chips: int, spread: float) -> float:
    """By how much a pipeline is slower than its slowest stage, which takes the longest of `slots`, would have it.

    Of the j longest stages the shortest, with the slowest of all their chips (`chips` a stage), is a bound for every j.
    """
    longest = sorted(slots, reverse=True)
    late = max(slot * (1 + behind(chips * (j + 1), spread)) for j, slot in enumerate(longest))
    return late / longest[0] - 1


def behind(ranks: int, spread: float) -> float:
    """By how much the slowest of so many chips lies behind the mean: the expected maximum of normal variables."""
    return spread * sqrt(2 * log(ranks)) if ranks > 1 else 0.0
