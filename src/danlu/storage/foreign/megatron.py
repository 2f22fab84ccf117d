"""Megatron's `torch_dist` folders: PyTorch's distributed checkpoint, with files of Megatron's own beside it."""

import json
from pathlib import Path

from danlu.storage.foreign.dcp import Found, open_dcp
from danlu.storage.foreign.pickled import Refused

_OWN = "metadata.json"
_COMMON = "common.pt"


def open_megatron(folder: Path) -> Found:
    """Read a folder such as `iter_0000100`; tensors keep Megatron's names, layers and all."""
    path = folder / _OWN
    try:
        backend = json.loads(path.read_text("utf-8")).get("sharded_backend")
    except FileNotFoundError:
        raise Refused(f"{folder} must hold {_OWN}, but does not; it is no folder of Megatron's") from None
    except (ValueError, AttributeError) as error:
        raise Refused(f"{path} must be a JSON object, but is not: {error}") from None
    if backend != "torch_dist":
        raise Refused(f"{path} must name the backend torch_dist, but names {backend!r}; save it with that one")
    found = open_dcp(folder)
    if (folder / _COMMON).exists():
        found.left_out.append(f"{_COMMON}: arguments, iteration, scheduler and random states; it is a pickle")
    return found
