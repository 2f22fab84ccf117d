"""A layout for the nodes that are left: fewer replicas, or what the planner finds, or fewer shards."""

from collections.abc import Iterator

from danlu.planner.request import PlanRequest, PlanRequestError
from danlu.planner.search import search
from danlu.spec.check import find_problems, parsed_without_file
from danlu.spec.cluster import Cluster
from danlu.spec.divisors import divisors
from danlu.spec.model import Model
from danlu.spec.plan import Plan
from danlu.spec.recipe import Recipe


def find_smaller_plan(
    recipe: Recipe, plan: Plan, cluster: Cluster | None, nodes: int, ranks_per_node: int
) -> Plan | None:
    """A plan for as many of `nodes` nodes as can be used, with the same batch; None if there is none.

    The samples of every step stay what they are: ranks have larger shares of the batch, in more microbatches.
    """
    for count in range(nodes, 0, -1):
        for candidate in _candidates(recipe, plan, cluster, count * ranks_per_node):
            parsed = parsed_without_file(cluster, "cluster") if cluster else None
            if not find_problems(parsed_without_file(recipe, "recipe"), parsed_without_file(candidate), parsed):
                return candidate
    return None


def is_only_fewer_replicas(plan: Plan, smaller: Plan) -> bool:
    """Whether each rank that is left holds what it held."""
    return smaller.degrees == plan.degrees.model_copy(update={"replicate": smaller.degrees.replicate})


def _candidates(recipe: Recipe, plan: Plan, cluster: Cluster | None, world: int) -> Iterator[Plan]:
    degrees = plan.degrees
    replicas, rest = divmod(world, degrees.world // degrees.replicate)
    if replicas and not rest:
        yield from _with_data_ranks(recipe, plan, replicas, degrees.shard)
    if cluster is not None and isinstance(recipe.model, Model):
        try:
            found = search(PlanRequest(recipe=recipe, cluster=cluster, chips=world), shown=1).best
        except PlanRequestError:
            found = ()
        yield from (each.plan for each in found)
    shards, rest = divmod(world, degrees.world // (degrees.replicate * degrees.shard))
    if cluster is None and shards and not rest:  # nothing is known about memory: what does not fit is another fault
        yield from _with_data_ranks(recipe, plan, 1, shards)


def _with_data_ranks(recipe: Recipe, plan: Plan, replicate: int, shard: int) -> Iterator[Plan]:
    """The plan with other data-parallel degrees, and microbatches that are no larger than they were."""
    share, rest = divmod(recipe.batch.sequences, replicate * shard)
    if rest:
        return
    before = recipe.batch.sequences // (plan.degrees.replicate * plan.degrees.shard * plan.microbatches)
    microbatches = min(count for count in divisors(share) if share // count <= max(1, before))
    degrees = plan.degrees.model_copy(update={"replicate": replicate, "shard": shard})
    mapping = {axis: levels for axis, levels in plan.mapping.items() if axis not in ("replicate", "shard")}
    for placed in (mapping, {}):
        changes = {"degrees": degrees, "mapping": placed, "microbatches": microbatches, "prediction": None}
        yield plan.model_copy(update=changes)
