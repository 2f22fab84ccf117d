"""Layouts that the cost model cannot tell apart, and which of them is the simplest.

Between two layouts of one model on the same chips most of the model's error is common and cancels; what is left is the
width of a tie. Of every combination of degrees only the fastest layout takes part: schedules and recompute modes of the
same degrees share still more of their error, so that their order can be trusted further.
"""

from collections.abc import Iterable
from math import floor

from danlu.planner.pricing import PricedPlan
from danlu.planner.search_space import Candidate

TIE_WIDTH = 0.03
"""Relative difference of predicted step times up to which two layouts of one model on the same chips are a tie.

It is the error of one layout's prediction relative to another's: layouts of one group differ by correlated errors, and
half of the pairs of published ones whose predicted times are close err by no more than about this much from each other
(`benchmarks/validation/residuals.py` prints the figure).
"""


MEMORY_STEP = 0.05
"""Share of a chip's memory in which free memory is compared: less than that is as uncertain as the times of a tie."""


def tie_limit(fastest: float, width: float = TIE_WIDTH) -> float:
    """Seconds of a step up to which a layout ties with the fastest."""
    return fastest * (1 + width)


def axes_in_use(candidate: Candidate) -> int:
    """Parallel axes with more than one rank."""
    (pp, cp, tp, ep, *_), _, (replicate, shard, *_) = candidate
    return sum(degree > 1 for degree in (pp, replicate, shard, cp, tp, ep))


def free_memory_steps(priced: PricedPlan) -> int:
    """Free memory of the fullest chip, in whole steps of `MEMORY_STEP` of it."""
    return floor((1 - priced.peak_bytes / priced.request.cluster.chip.memory) / MEMORY_STEP)


def simplicity(priced: PricedPlan) -> tuple[object, ...]:
    """Sorts tied layouts: fewer parallel axes in use first, then more free memory, then less predicted time."""
    return axes_in_use(priced.candidate), -free_memory_steps(priced), priced.sort_key


def simplest_first(plans: Iterable[PricedPlan]) -> tuple[PricedPlan, ...]:
    """Tied layouts in the order in which they are proposed."""
    return tuple(sorted(plans, key=simplicity))
