"""Rules between a custom model and its degrees; `build` checks what its modules must offer."""

from collections.abc import Iterator

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


def no_expert_parallelism(recipe: ParsedSpec[Recipe], plan: ParsedSpec[Plan]) -> Iterator[Problem]:
    """Experts are sharded over ranks by Danlu's own expert layers."""
    if (ep := plan.value.degrees.ep) > 1:
        yield plan.problem(
            "degrees.ep",
            f"is {ep}, but experts inside a custom model (`model.factory`) are not known",
            "ep = 1: `shard` shards their states; or describe the model with a table [model.moe]",
        )


CUSTOM_AXIS_RULES: tuple[LayoutRule, ...] = (no_context_parallelism, no_expert_parallelism)
