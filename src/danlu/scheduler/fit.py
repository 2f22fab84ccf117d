"""Does the plan fit the nodes asked for? Said before anything is submitted, with the number that would fit."""

from danlu.spec.cluster import Cluster
from danlu.spec.plan import Plan


def ranks_per_node(nodes: int, asked: int | None, plan: Plan | None, cluster: Cluster | None) -> int:
    """How many ranks each node gets: as asked; or as the plan needs; or one a chip of the cluster; or one.

    Raises `ValueError` when plan, nodes and cluster do not go together.
    """
    if plan is not None:
        ranks = _by_plan(nodes, asked, plan.degrees.world)
    else:
        ranks = asked or (cluster.chips_per_node if cluster else 1)
    if cluster is not None:
        _check_cluster(nodes, ranks, cluster)
    return ranks


def _by_plan(nodes: int, asked: int | None, world: int) -> int:
    if asked is None:
        if world % nodes == 0:
            return world // nodes
        fits = " or ".join(f"--nodes {count}" for count in _neighbours(nodes, world))
        raise ValueError(f"the plan has {world} ranks, which {nodes} nodes cannot share evenly: {fits} would fit")
    if nodes * asked == world:
        return asked
    options = [f"--nodes {world // asked}"] if world % asked == 0 else []
    options += [f"--ranks-per-node {world // nodes}"] if world % nodes == 0 else []
    fits = " or ".join(options) or f"a plan of {nodes * asked} ranks"
    raise ValueError(
        f"the plan has {world} ranks, but {nodes} nodes × {asked} ranks are {nodes * asked}: {fits} would fit"
    )


def _neighbours(nodes: int, world: int) -> list[int]:
    """The largest number of nodes below and the smallest above, if there is one, that share the ranks evenly."""
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
        raise ValueError(f"{cluster.name} has {available} nodes, but {nodes} are asked: --nodes {available} would fit")
