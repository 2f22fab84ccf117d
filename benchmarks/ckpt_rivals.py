"""What `ckpt_speed.py` compares our saves with: copies of the same bytes, training steps, PyTorch's own saves."""

import ctypes
import mmap
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.tensor import DTensor

from danlu.storage.store.checksum import copy_with_crc32c


def seconds_of(act: Callable[[], Any]) -> float:
    """Seconds of one call."""
    began = time.perf_counter()
    act()
    return time.perf_counter() - began


def slowest(seconds: float) -> float:
    """The seconds of the slower rank."""
    found = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return float(found)


class Copy:
    """Copy the same bytes into preallocated memory, in several ways."""

    def __init__(self, tensors: Mapping[str, DTensor], held: int) -> None:
        self.sources = [tensor.to_local().numpy() for tensor in tensors.values()]
        target = np.frombuffer(mmap.mmap(-1, held), dtype=np.float32)
        target[:] = 0
        starts = np.cumsum([0, *(source.size for source in self.sources)])
        self.targets = [
            target[start : start + source.size].reshape(source.shape)
            for start, source in zip(starts, self.sources, strict=False)
        ]
        self.ways: dict[str, Callable[[Any, Any], Any]] = {
            "numpy": np.copyto,
            "memcpy": lambda target, source: ctypes.memmove(target.ctypes.data, source.ctypes.data, source.nbytes),
            # Bypasses the cache, which is faster for so many bytes; and the checksum during the copy is free.
            "ours": lambda target, source: copy_with_crc32c(memoryview(source).cast("B"), memoryview(target).cast("B")),
        }

    def __call__(self) -> float:
        """Seconds of the fastest way, on the slower rank."""
        found = []
        for way in self.ways.values():
            dist.barrier()
            began = time.perf_counter()
            for source, target in zip(self.sources, self.targets, strict=True):
                way(target, source)
            found.append(slowest(time.perf_counter() - began))
        return min(found)


class Others:
    """PyTorch's own saves, each in its own group.

    Their threads' collectives would otherwise interleave with those of the training in any order, and hang.
    """

    def __init__(self, tensors: Mapping[str, DTensor], work: Path) -> None:
        self.tensors: dict[str, Tensor] = dict(tensors)
        self.work = work
        self.group = dist.new_group()
        self.kept = DefaultStager(StagingOptions(False, False, False, False))
        self.beside = DefaultStager(StagingOptions(False, False, True, False))
        for stager in (self.kept, self.beside):  # memory is allocated before the first save, as ours is
            self.async_save(stager)()

    def async_save(self, stager: DefaultStager | None) -> Callable[[], None]:
        """Begin; what waits for its end is returned. With a stager that is the caller's, it is kept."""
        begun = dcp.async_save(
            self.tensors, checkpoint_id=self.work / "dcp-async", process_group=self.group, async_stager=stager
        )
        if isinstance(begun, Future):
            return begun.result
        self.staged = begun.staging_completion
        return begun.upload_completion.result

    def close(self) -> None:
        """Give the stagers' memory back."""
        self.kept.close()
        self.beside.close()


class Forward:
    """Work of about so many seconds that does not change the state."""

    def __init__(self, seconds: float) -> None:
        self.a = torch.randn(512, 512)
        one = min(seconds_of(lambda: self.a @ self.a) for _ in range(50))
        self.times = max(1, round(seconds / one))

    def __call__(self) -> None:
        """Work."""
        for _ in range(self.times):
            self.a @ self.a
