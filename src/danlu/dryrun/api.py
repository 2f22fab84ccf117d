"""`danlu.dryrun`: one step of a run of any size, on this machine, without its memory or its network."""

from collections.abc import Callable, Sequence

from danlu.comm.rank_layout import dense_ranks
from danlu.framework.custom.check import check_custom_model
from danlu.spec import Cluster, Plan
from danlu.spec.check import ClusterSource, PlanSource, RecipeSource, load_run_spec
from danlu.spec.trace import DryRun

MAX_DEFAULT_PP_RANKS = 4
"""Up to this many pp ranks are all run by default."""


class RankError(ValueError):
    """A rank that a plan does not have."""


def dryrun(
    recipe: RecipeSource,
    *,
    plan: PlanSource | None = None,
    cluster: ClusterSource | None = None,
    ranks: Sequence[int | str] = (),
    whole: bool = False,
    on_rank: Callable[[int, int, int], None] = lambda rank, number, count: None,
) -> DryRun:
    """Run the real program for one step without the machine: what each rank computes, sends and holds.

    `recipe`, `plan` and `cluster` are files or descriptions; a cluster may be one of the catalog; without a plan there
    is one rank. `ranks` to run are numbers, "first", "last" or "classes", one rank per pp rank; by default classes, or
    the first and last of many. `whole` runs every layer, also those identical to their neighbors. `on_rank` is called
    with each rank, which of how many it is.

    Raises `SpecError` if the descriptions contradict each other, `RankError` for a rank that the plan does not have.
    """
    spec = load_run_spec(recipe, plan, cluster, default=Plan())
    check_custom_model(spec)
    numbers = _rank_numbers(ranks, spec.plan, spec.cluster)
    from danlu.dryrun.dry_run import dry_run_ranks

    def report(rank: int) -> None:
        on_rank(rank, numbers.index(rank) + 1, len(numbers))

    return dry_run_ranks(spec.recipe, spec.plan, spec.cluster, numbers, all_layers=whole, on_rank=report)


def _rank_numbers(ranks: Sequence[int | str], plan: Plan, cluster: Cluster | None) -> list[int]:
    """Ranks by number or name, each once."""
    classes: list[int] = dense_ranks(plan, cluster)[:, 0, 0, 0, 0].tolist()
    if not ranks:
        return classes if len(classes) <= MAX_DEFAULT_PP_RANKS else [classes[0], classes[-1]]
    world = plan.degrees.world
    named = {"first": [0], "last": [world - 1], "classes": classes}
    found: list[int] = []
    for each in ranks:
        numbers = named.get(each, []) if isinstance(each, str) else [each] if 0 <= each < world else []
        if not numbers:
            raise RankError(f'"{each}" must be `first`, `last`, `classes` or a number from 0 to {world - 1}')
        found += [number for number in numbers if number not in found]
    return found
