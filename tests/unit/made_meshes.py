"""Meshes without a network: what a rank knows of its place, for any rank of any plan."""

from typing import Any

import torch

from danlu.comm.layout import dense_layout, expert_layout
from danlu.comm.mesh import Mesh
from danlu.spec.plan import Degrees, Plan


def place_of(rank: int, **degrees: int) -> Mesh:
    """The mesh as this rank sees it; it has places, but no groups."""
    plan = Plan(degrees=Degrees(**degrees))
    no_groups: Any = None
    return Mesh(
        plan=plan,
        device=torch.device("cpu"),
        rank=rank,
        place=expert_layout(plan).place(rank) | dense_layout(plan).place(rank),
        groups={},
        parameters=no_groups,
        expert_parameters=None,
        tensor=None,
        experts=None,
    )
