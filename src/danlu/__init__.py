"""Danlu: train large models on the machines that are really there.

The command line is `danlu --help`. For a custom training loop, see `danlu.parallelize`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from danlu.framework.api import Checkpointer, Guard, StepSampler, get_mesh, parallelize, plan, shard_batch

__version__ = "0.1.0"

__all__ = ["Checkpointer", "Guard", "StepSampler", "__version__", "get_mesh", "parallelize", "plan", "shard_batch"]


_RENAMED = {"DataOrder": "StepSampler", "mesh_of": "get_mesh", "share": "shard_batch"}


def __getattr__(name: str) -> Any:
    """Import torch only when a name that needs it is used: the command line starts without it."""
    if name in _RENAMED:
        raise AttributeError(f"danlu.{name} is now called danlu.{_RENAMED[name]}")
    if name not in __all__:
        raise AttributeError(f"module 'danlu' has no attribute {name!r}")
    return getattr(import_module("danlu.framework.api"), name)
