"""Danlu: train large models on the machines that are really there.

The command line is `danlu --help`. For a training loop of your own, see `danlu.parallelize`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from danlu.framework.library import Checkpointer, DataOrder, Guard, mesh_of, parallelize, plan, share

__version__ = "0.1.0"

__all__ = ["Checkpointer", "DataOrder", "Guard", "__version__", "mesh_of", "parallelize", "plan", "share"]


def __getattr__(name: str) -> Any:
    """Load torch only for those who ask for what needs it: the command line starts without."""
    if name not in __all__:
        raise AttributeError(f"module 'danlu' has no attribute {name!r}")
    return getattr(import_module("danlu.framework.library"), name)
