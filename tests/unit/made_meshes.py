"""Meshes without a network: what a rank knows of its place, for any rank of any plan."""

from typing import Any

from danlu.comm.mesh import ParallelMesh
from danlu.comm.rank_layout import dense_layout, expert_layout
from danlu.comm.world import World
from danlu.spec.plan import Degrees, Plan


def place_of(rank: int, **degrees: int) -> ParallelMesh:
    """The mesh as this rank sees it; it has places, but no groups."""
    plan = Plan(degrees=Degrees(**degrees))
    no_groups: Any = None
    return ParallelMesh(
        plan=plan,
        world=World(rank, plan.degrees.world),
        coordinates=expert_layout(plan).coordinates(rank) | dense_layout(plan).coordinates(rank),
        groups={},
        fsdp_mesh=no_groups,
        expert_fsdp_mesh=None,
        tp_mesh=None,
        ep_mesh=None,
    )
