"""Checkpoints: save and load a run's tensors under global names, at any layout.

The seam of five questions that the rest of Danlu asks. Behind it today: PyTorch's distributed
checkpoint (DCP), one folder a step, committed by a rename after the last byte is on disk.
"""

import json
import shutil
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from danlu.storage.durable import sync_folder, write_durably

_SCALARS = "state.json"
_PARTIAL = ".partial"


class CheckpointError(RuntimeError):
    """A checkpoint cannot be used; the message says which and why."""


class Checkpoints:
    """The checkpoints of one run. All ranks call `save` and `load` together, with what each holds."""

    def __init__(self, folder: Path, keep: int, device: torch.device) -> None:
        """`device` is where this rank's tensors live: small agreements between ranks are made there."""
        self.folder = folder
        self.keep = keep
        self.device = device

    def steps(self) -> list[int]:
        """Steps with a complete checkpoint, oldest first, as this rank sees them."""
        return sorted(int(path.name.removeprefix("step-")) for path in self._complete())

    def latest(self) -> int | None:
        """The newest complete checkpoint, or None; rank 0 looks, because another rank's file system may lag behind."""
        newest = self._from_rank_0(lambda: max(self.steps(), default=-1))
        return None if newest < 0 else newest

    def save(self, step: int, tensors: Mapping[str, Tensor], scalars: Mapping[str, Any]) -> Path:
        """Write a checkpoint; when this returns it is complete, and older ones beyond `keep` are gone."""
        path = self._path(step)
        partial = path.with_name(path.name + _PARTIAL)
        if self._from_rank_0(lambda: _make_way(path, partial)):
            raise CheckpointError(f"checkpoint {path} must be new, but exists already; it is left as it is")
        save(dict(tensors), storage_writer=FileSystemWriter(partial))
        if dist.get_rank() == 0:
            write_durably(partial / _SCALARS, json.dumps(dict(scalars)))
            sync_folder(partial)
            partial.rename(path)
            sync_folder(self.folder)
            for old in self.steps()[: -self.keep]:
                _remove(self._path(old))
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

    def read(self, step: int, tensors: Mapping[str, Tensor]) -> None:
        """Fill whole tensors in place, in a process that is no rank; only what is asked for is read."""
        with warnings.catch_warnings():
            # It says that it takes this for a single process, which is what is meant.
            warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
            load(dict(tensors), storage_reader=FileSystemReader(self._path(step)), no_dist=True)

    def _from_rank_0(self, answer: Callable[[], int]) -> int:
        """What rank 0 answers, on every rank."""
        told = torch.tensor(answer() if dist.get_rank() == 0 else 0, device=self.device)
        dist.broadcast(told, src=0)
        return int(told)

    def _path(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}"

    def _complete(self) -> list[Path]:
        return [path for path in self.folder.glob("step-*") if path.suffix != _PARTIAL and (path / _SCALARS).exists()]


def _make_way(path: Path, partial: Path) -> bool:
    """Whether the checkpoint exists; if not, what a run that died in the middle of saving it left is removed."""
    if not path.exists() and partial.exists():
        shutil.rmtree(partial)
    return path.exists()


def _remove(path: Path) -> None:
    """Delete a checkpoint; one that is half deleted does not look complete."""
    partial = path.with_name(path.name + _PARTIAL)
    path.rename(partial)
    shutil.rmtree(partial)
