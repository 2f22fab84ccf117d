"""Checkpoints: save and load a run's tensors under global names, at any layout.

The seam of four questions that the rest of Danlu asks. Behind it today: PyTorch's distributed
checkpoint (DCP), one folder a step, committed by a rename after the last byte is on disk.
"""

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

_SCALARS = "state.json"
_PARTIAL = ".partial"


class CheckpointError(RuntimeError):
    """A checkpoint cannot be used; the message says which and why."""


class Checkpoints:
    """The checkpoints of one run. All ranks call `save` and `load` together, with what each holds."""

    def __init__(self, folder: Path, keep: int) -> None:
        self.folder = folder
        self.keep = keep

    def steps(self) -> list[int]:
        """Steps with a complete checkpoint, oldest first."""
        return sorted(int(path.name.removeprefix("step-")) for path in self._complete())

    def latest(self) -> int | None:
        """The newest complete checkpoint, or None."""
        return max(self.steps(), default=None)

    def save(self, step: int, tensors: Mapping[str, Tensor], scalars: Mapping[str, Any]) -> Path:
        """Write a checkpoint; when this returns it is complete, and older ones beyond `keep` are gone."""
        path = self._path(step)
        if path.exists():
            raise CheckpointError(f"checkpoint {path} must be new, but exists already; it is left as it is")
        partial = path.with_name(path.name + _PARTIAL)
        if dist.get_rank() == 0 and partial.exists():
            shutil.rmtree(partial)  # what a run that died in the middle of saving left behind
        dist.barrier()
        save(dict(tensors), storage_writer=FileSystemWriter(partial))
        if dist.get_rank() == 0:
            _write_durably(partial / _SCALARS, json.dumps(dict(scalars)))
            _sync(partial)
            partial.rename(path)
            _sync(self.folder)
            for old in self.steps()[: -self.keep]:
                shutil.rmtree(self._path(old))
        dist.barrier()
        return path

    def load(self, step: int, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
        """Fill `tensors` in place, whatever layout wrote them, and return the scalars."""
        path = self._path(step)
        if not (path / _SCALARS).exists():
            raise CheckpointError(f"checkpoint {path} must be complete, but is not there; complete are {self.steps()}")
        load(dict(tensors), storage_reader=FileSystemReader(path))
        scalars: dict[str, Any] = json.loads((path / _SCALARS).read_text())
        return scalars

    def _path(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}"

    def _complete(self) -> list[Path]:
        return [path for path in self.folder.glob("step-*") if path.suffix != _PARTIAL and (path / _SCALARS).exists()]


def _write_durably(path: Path, text: str) -> None:
    with path.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
