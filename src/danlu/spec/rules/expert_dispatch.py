"""Rules of `token_dispatcher` and `dispatch_chunks`: where they would do nothing."""

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


def parts_are_sent(plan: ParsedSpec[Plan]) -> Iterator[Problem]:
    """Parts are sent to experts on other ranks."""
    chunks = plan.value.dispatch_chunks
    if chunks > 1 and plan.value.degrees.ep == 1:
        yield plan.problem(
            "dispatch_chunks",
            f"is {chunks}, but `degrees.ep` is 1, so tokens stay where they are",
            "dispatch_chunks = 1, or set `ep` to 2 or more under [degrees]",
        )


EXPERT_DISPATCH_RULES: tuple[PlanRule, ...] = (experts_are_apart, parts_are_sent)
