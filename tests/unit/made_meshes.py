"""Meshes without a network: what a rank knows of its place, for any rank of any plan."""

from typing import Any

import torch

from danlu.comm.layout import dense_ranks, expert_ranks
from danlu.comm.mesh import Mesh, _place
from danlu.spec.placing import EXPERT_AXES
from danlu.spec.plan import DENSE_AXES, Degrees, Plan


def place_of(rank: int, **degrees: int) -> Mesh:
    """The mesh as this rank sees it; it has places, but no groups."""
    plan = Plan(degrees=Degrees(**degrees))
    no_groups: Any = None
    return Mesh(
        plan=plan,
        device=torch.device("cpu"),
        rank=rank,
        place=_place(rank, expert_ranks(plan), EXPERT_AXES) | _place(rank, dense_ranks(plan), DENSE_AXES),
        groups={},
        parameters=no_groups,
        expert_parameters=None,
        tensor=None,
        experts=None,
    )
