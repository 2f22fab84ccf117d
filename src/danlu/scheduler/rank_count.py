"""Does the plan fit the requested nodes? Checked before anything is submitted, with the number that would fit."""

from danlu.spec.cluster import Cluster
from danlu.spec.plan import Plan


def ranks_per_node(nodes: int, requested: int | None, plan: Plan | None, cluster: Cluster | None) -> int:
    """Ranks of each node: as requested; or as the plan needs; or one per chip of the cluster; or one.

    Raises `ValueError` when plan, nodes and cluster do not fit together.
    """
    if plan is not None:
        ranks = _ranks_from_plan(nodes, requested, plan.degrees.world)
    else:
        ranks = requested or (cluster.chips_per_node if cluster else 1)
    if cluster is not None:
        _check_cluster(nodes, ranks, cluster)
    return ranks


def _ranks_from_plan(nodes: int, requested: int | None, world: int) -> int:
    if requested is None:
        if world % nodes == 0:
            return world // nodes
        fits = " or ".join(f"--nodes {count}" for count in _nearest_divisors(nodes, world))
        raise ValueError(f"the plan has {world} ranks, which do not divide evenly over {nodes} nodes: {fits} would fit")
    if nodes * requested == world:
        return requested
    options = [f"--nodes {world // requested}"] if world % requested == 0 else []
    options += [f"--ranks-per-node {world // nodes}"] if world % nodes == 0 else []
    fits = " or ".join(options) or f"a plan of {nodes * requested} ranks"
    raise ValueError(
        f"the plan has {world} ranks, but {nodes} nodes × {requested} ranks are {nodes * requested}: {fits} would fit"
    )


def _nearest_divisors(nodes: int, world: int) -> list[int]:
    """The next smaller and (if any) next larger number of nodes over which the ranks divide evenly."""
    even = [count for count in range(1, world + 1) if world % count == 0]
    return [max(count for count in even if count < nodes), *(count for count in even if count > nodes)][:2]


def _check_cluster(nodes: int, ranks: int, cluster: Cluster) -> None:
    if ranks > cluster.chips_per_node:
        chips = cluster.chips_per_node
        raise ValueError(
            f"a node of {cluster.name} has {chips} chips, but gets {ranks} ranks: at most {chips} would fit"
        )
    available = cluster.chips // cluster.chips_per_node
    if nodes > available:
        raise ValueError(
            f"{cluster.name} has {available} nodes, but {nodes} are requested: --nodes {available} would fit"
        )
