"""Try out a save before the first step: may it be written, is there room, how long will it take?

A store that is full or closed is found out here, when nothing is lost, and not hours later at the first save.
"""

import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass
from math import sqrt

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from danlu.storage.checkpoint.checkpoints import Checkpoints
from danlu.storage.checkpoint.pieces import local_bytes
from danlu.storage.checkpoint.saver import SLOTS
from danlu.storage.checkpoint.staging import CHUNK_BYTES, copied
from danlu.storage.store import Store

PROBE_BYTES = 64 << 20
"""Most that a host writes, and that a rank copies, to learn how quick it is."""
_LEAST_PROBE = 4096


class NotReady(RuntimeError):  # noqa: N818 - it is what the store is
    """Checkpoints could not be saved; told before the first step, with what to do."""


@dataclass(frozen=True)
class Rehearsal:
    """What a save will cost; the same on every rank."""

    bytes: int
    """Of a save, over all ranks."""
    seconds: float
    """To write it, at the speed of the probes."""
    stall: float
    """Seconds the training will wait: those of the slowest rank's copy."""
    bandwidth: float
    """Bytes a second of all hosts together, or what they may write."""
    free: int | None
    memory: int = 0
    """Bytes of host memory that saves keep, over all hosts: buffers, and copies for other hosts."""

    def interval(self, between_failures: float) -> float:
        """Seconds between saves that lose least to failures, by Young (1974); never less than a save takes."""
        return max(self.seconds, sqrt(2 * self.seconds * between_failures))


def rehearse(checkpoints: Checkpoints, tensors: Mapping[str, Tensor], *, first_on_host: bool) -> Rehearsal:
    """Take the memory for saves, write and remove probes, and reckon what a save costs; all ranks call it.

    Raises `NotReady` on all ranks if the store or the memory of any would not take a save.
    """
    store, keep = checkpoints.store, checkpoints.shelf.keep
    failure, mine = "", 0
    try:
        mine = checkpoints.prepare(tensors)
    except OSError as error:
        failure = (
            f"this host's memory must hold {SLOTS} copies of what a rank saves, but does not: {error}; "
            "give the container or /dev/shm more"
        )
    stall = mine / _copy_speed(tensors) if not failure else 0.0
    speed = 0.0
    if first_on_host and not failure:
        try:
            speed = _write_speed(store, mine, exclusive=checkpoints.ranks.rank == 0)
        except (OSError, ValueError) as error:
            failure = f"{store.name} does not take checkpoints: {error}; give another place, or mend this one"
    total, bandwidth = _over_ranks([mine, round(speed)], dist.ReduceOp.SUM, checkpoints.ranks.device)
    free = store.free() if not failure and checkpoints.ranks.rank == 0 else None
    if free is not None and free < (needed := total * max(1, keep + 1 - len(checkpoints.shelf.steps()))):
        failure = (
            f"{store.name} must have room for {keep} checkpoints and the one being written, {needed} bytes more, but "
            f"has {free}; make room, or lower `checkpoint.keep`"
        )
    micros, failed = _over_ranks([round(stall * 1e6), bool(failure)], dist.ReduceOp.MAX, checkpoints.ranks.device)
    if failed:
        raise NotReady(failure or f"another rank cannot save to {store.name}; its log says why")
    if limit := checkpoints.policy.bandwidth:
        bandwidth = min(bandwidth, round(limit * checkpoints.ranks.world))
    memory = total * (SLOTS + checkpoints.has_neighbours)
    return Rehearsal(total, total / max(bandwidth, 1), micros / 1e6, bandwidth, free, memory)


def _write_speed(store: Store, mine: int, *, exclusive: bool) -> float:
    """Bytes a second of one file that is written as a pack is; it is gone again when this returns."""
    name = f"rehearsal-{secrets.token_hex(8)}"
    try:
        if exclusive:  # a manifest is created, never written over: the store must be able to
            store.create(f"{name}.mark", b"danlu")
        content = np.random.default_rng().bytes(min(PROBE_BYTES, max(mine, _LEAST_PROBE)))
        began = time.perf_counter()
        store.write(f"{name}.probe", [content])
        return len(content) / max(time.perf_counter() - began, 1e-9)
    finally:
        for end in (".mark", ".probe"):
            store.remove(name + end)


def _copy_speed(tensors: Mapping[str, Tensor]) -> float:
    """Bytes a second at which this rank's tensors come into host memory, hashed on the way."""
    target = memoryview(bytearray(b"1" * CHUNK_BYTES))  # no zeros: pages that are really there
    done, began = 0, time.perf_counter()
    for tensor in tensors.values():
        part = local_bytes(tensor)[:CHUNK_BYTES]
        if part.numel():
            copied(part, target[: part.numel()])
            done += part.numel()
        if done >= PROBE_BYTES:
            break
    return max(done, 1) / max(time.perf_counter() - began, 1e-9)


def _over_ranks(values: list[int], how: dist.ReduceOp.RedOpType, device: torch.device) -> list[int]:
    mine = torch.tensor(values, dtype=torch.int64, device=device)
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(mine, how)
    return [int(value) for value in mine.tolist()]
