"""Rules between a custom model and its degrees; `build` checks what its modules must offer."""

from collections.abc import Iterator

from danlu.spec.divisors import closest_divisor
from danlu.spec.load import ParsedSpec
from danlu.spec.plan import Plan
from danlu.spec.problem import Problem
from danlu.spec.recipe import Recipe
from danlu.spec.rules.shape import LayoutRule


def no_context_parallelism(recipe: ParsedSpec[Recipe], plan: ParsedSpec[Plan]) -> Iterator[Problem]:
    """Attention over a shard of a sequence must exchange heads, which only Danlu's own attention does."""
    if (cp := plan.value.degrees.cp) > 1:
        yield plan.problem(
            "degrees.cp",
            f"is {cp}, but the attention of a custom model (`model.factory`) sees only its own positions",
            "cp = 1, with its ranks under `shard` or `tp`; or describe the model by its shape",
        )


def experts_fold_shard(recipe: ParsedSpec[Recipe], plan: ParsedSpec[Plan]) -> Iterator[Problem]:
    """Experts of a custom model are divided over the ranks of `shard`: those of `tp` have the same tokens.

    Which classes of experts are known, and how many there are, is checked with its modules.
    """
    degrees = plan.value.degrees
    if degrees.ep > 1 and degrees.tp > 1:
        yield plan.problem(
            "degrees.ep",
            f"is {degrees.ep} and `tp` is {degrees.tp}, but the ranks of `tp` have the same tokens of a custom model "
            "(`model.factory`), and would send each of them to its experts several times",
            "ep = 1 or tp = 1; a model that is described by its shape has both",
        )
    elif degrees.shard % degrees.ep:
        valid = closest_divisor(degrees.ep, degrees.shard)
        yield plan.problem(
            "degrees.ep",
            f"is {degrees.ep}, but must divide `shard` ({degrees.shard})",
            f"ep = {valid}, or more `shard`",
        )


CUSTOM_AXIS_RULES: tuple[LayoutRule, ...] = (no_context_parallelism, experts_fold_shard)
