"""What slow chips cost: a step waits for the slowest one, unless its stage has slack.

Chips of one kind differ by 8 % from one end to the other, up to 22 % (Sinha et al., "Not all GPUs are created equal",
SC 2022), which is a standard deviation of some 2 %. For ranks that share cores `danlu probe` measures it.
"""

from collections.abc import Sequence
from math import log, sqrt


def straggler_slowdown(stage_times: Sequence[float], chips: int, spread: float) -> float:
    """Relative slowdown of a pipeline by its slowest chip, with `chips` per stage.

    For every j, the shortest of the j longest stages with the slowest of all their chips is a lower bound.
    """
    longest = sorted(stage_times, reverse=True)
    late = max(seconds * (1 + slowest_chip_lag(chips * (j + 1), spread)) for j, seconds in enumerate(longest))
    return late / longest[0] - 1


def slowest_chip_lag(ranks: int, spread: float) -> float:
    """Relative lag of the slowest of `ranks` chips behind the mean: the expected maximum of normal variables."""
    return spread * sqrt(2 * log(ranks)) if ranks > 1 else 0.0
