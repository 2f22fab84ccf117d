"""Rules of `context_parallel`: where it would do nothing."""

from collections.abc import Iterator

from danlu.spec.load import ParsedSpec
from danlu.spec.plan import Plan
from danlu.spec.problem import Problem
from danlu.spec.rules.pipeline import PlanRule


def a_ring_has_ranks(plan: ParsedSpec[Plan]) -> Iterator[Problem]:
    """Keys and values of one rank travel nowhere."""
    if plan.value.context_parallel == "ring" and plan.value.degrees.cp == 1:
        yield plan.problem(
            "context_parallel",
            "is ring, but `degrees.cp` is 1, so keys and values stay where they are",
            'context_parallel = "ulysses", or set `cp` to 2 or more under [degrees]',
        )


CONTEXT_RULES: tuple[PlanRule, ...] = (a_ring_has_ranks,)
