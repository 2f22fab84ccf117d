"""Rules between a user's own model and the degrees it can have; what its modules must offer is seen by `build`."""

from collections.abc import Iterator

from danlu.spec.load import Sourced
from danlu.spec.plan import Plan
from danlu.spec.problem import Problem
from danlu.spec.recipe import Recipe
from danlu.spec.rules.shape import LayoutRule


def sequences_stay_whole(recipe: Sourced[Recipe], plan: Sourced[Plan]) -> Iterator[Problem]:
    """Attention over a part of a sequence must exchange heads, which only a described model's does."""
    if (cp := plan.value.degrees.cp) > 1:
        yield plan.problem(
            "degrees.cp",
            f"is {cp}, but the attention of a `model.factory` sees only the positions it is given",
            "cp = 1, with its ranks under `shard` or `tp`; or describe the model by its shape",
        )


def experts_are_its_own(recipe: Sourced[Recipe], plan: Sourced[Plan]) -> Iterator[Problem]:
    """Experts are spread over ranks by Danlu's own expert layers."""
    if (ep := plan.value.degrees.ep) > 1:
        yield plan.problem(
            "degrees.ep",
            f"is {ep}, but experts inside a `model.factory` are not known to be such",
            "ep = 1: `shard` spreads their states; or describe the model with a table [model.moe]",
        )


OWN_LAYOUT_RULES: tuple[LayoutRule, ...] = (sequences_stay_whole, experts_are_its_own)
