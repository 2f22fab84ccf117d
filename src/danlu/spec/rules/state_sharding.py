"""Rules of how gradients and optimizer states are sharded: where a setting would do nothing, or cannot work."""

from collections.abc import Iterator

from danlu.spec.load import ParsedSpec
from danlu.spec.plan import Plan
from danlu.spec.problem import Problem
from danlu.spec.recipe import Recipe
from danlu.spec.rules.pipeline import PlanRule
from danlu.spec.rules.shape import LayoutRule


def pipelines_reduce_once(plan: ParsedSpec[Plan]) -> Iterator[Problem]:
    """Torch's pipelining reduces gradients after the last microbatch."""
    if plan.value.reduce_gradients == "microbatch" and plan.value.degrees.pp > 1:
        yield plan.problem(
            "reduce_gradients",
            f'is "microbatch", but `degrees.pp` is {plan.value.degrees.pp}, and a pipeline reduces gradients once per '
            "step",
            'reduce_gradients = "step", or remove it',
        )


def there_is_more_than_one_microbatch(plan: ParsedSpec[Plan]) -> Iterator[Problem]:
    """With one microbatch, that is once per step."""
    if plan.value.reduce_gradients is not None and plan.value.microbatches == 1:
        yield plan.problem(
            "reduce_gradients",
            f'is "{plan.value.reduce_gradients}", but `microbatches` is 1, so it is unused',
            "microbatches = 2, or more; or remove it",
        )


def there_are_replicas(plan: ParsedSpec[Plan]) -> Iterator[Problem]:
    """Without replicas the optimizer's states are already sharded over all ranks."""
    if plan.value.shard_optimizer_over_replicas and plan.value.degrees.replicate == 1:
        yield plan.problem(
            "shard_optimizer_over_replicas",
            "is true, but `degrees.replicate` is 1, so the optimizer's states are already sharded over all ranks",
            "shard_optimizer_over_replicas = false, or set `replicate` to 2 or more under [degrees]",
        )


def muon_needs_whole_shards(recipe: ParsedSpec[Recipe], plan: ParsedSpec[Plan]) -> Iterator[Problem]:
    """Muon moves whole matrices, not rows of them."""
    if plan.value.shard_optimizer_over_replicas and recipe.value.optimizer.has_muon:
        yield plan.problem(
            "shard_optimizer_over_replicas",
            "is true, but the recipe's optimizer is Muon, which moves whole matrices and not some rows of them",
            "shard_optimizer_over_replicas = false, or `replicate = 1` and a larger `shard` under [degrees]",
        )


STATE_SHARDING_RULES: tuple[PlanRule, ...] = (
    pipelines_reduce_once,
    there_is_more_than_one_microbatch,
    there_are_replicas,
)
STATE_SHARDING_LAYOUT_RULES: tuple[LayoutRule, ...] = (muon_needs_whole_shards,)
