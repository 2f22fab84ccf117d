"""Megatron's `torch_dist` folders: PyTorch's distributed checkpoint, plus files of Megatron's own."""

import json
from pathlib import Path

from danlu.storage.checkpoint.foreign.dcp import SourceCheckpoint, open_dcp
from danlu.storage.checkpoint.foreign.safe_pickle import CheckpointImportError

_METADATA_FILE = "metadata.json"
_COMMON_FILE = "common.pt"


def open_megatron(folder: Path) -> SourceCheckpoint:
    """Open a folder such as `iter_0000100`; tensors keep Megatron's names."""
    path = folder / _METADATA_FILE
    try:
        backend = json.loads(path.read_text("utf-8")).get("sharded_backend")
    except FileNotFoundError:
        raise CheckpointImportError(
            f"{folder} must hold {_METADATA_FILE}, but does not; it is not a Megatron folder"
        ) from None
    except (ValueError, AttributeError) as error:
        raise CheckpointImportError(f"{path} must be a JSON object, but is not: {error}") from None
    if backend != "torch_dist":
        raise CheckpointImportError(
            f"{path} must name the backend torch_dist, but names {backend!r}; save it with torch_dist"
        )
    found = open_dcp(folder)
    if (folder / _COMMON_FILE).exists():
        found.skipped.append(f"{_COMMON_FILE}: arguments, iteration, scheduler and random states; it is a pickle")
    return found
