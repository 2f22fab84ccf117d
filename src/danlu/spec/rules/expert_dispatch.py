"""Rules of `token_dispatcher`: where it would do nothing."""

from collections.abc import Iterator

from danlu.spec.load import ParsedSpec
from danlu.spec.plan import Plan
from danlu.spec.problem import Problem
from danlu.spec.rules.pipeline import PlanRule


def experts_are_apart(plan: ParsedSpec[Plan]) -> Iterator[Problem]:
    """Tokens that stay on their rank are sent nowhere."""
    if plan.value.token_dispatcher == "deduplicated" and plan.value.degrees.ep == 1:
        yield plan.problem(
            "token_dispatcher",
            "is deduplicated, but `degrees.ep` is 1, so tokens stay where they are",
            'token_dispatcher = "alltoall", or set `ep` to 2 or more under [degrees]',
        )


EXPERT_DISPATCH_RULES: tuple[PlanRule, ...] = (experts_are_apart,)
