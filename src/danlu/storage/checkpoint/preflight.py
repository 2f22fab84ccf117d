"""Check before the first step whether checkpoints can be saved: write permission, free space, and time per save.

A full or read-only store fails here, when nothing is lost, and not hours later at the first save.
"""

import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass
from math import sqrt

import numpy as np
from torch import Tensor

from danlu.spec.byte_format import format_bytes
from danlu.storage.checkpoint.async_saver import STAGING_BUFFERS
from danlu.storage.checkpoint.boxes import CHUNK_BYTES
from danlu.storage.checkpoint.engine import CheckpointEngine
from danlu.storage.checkpoint.local_shards import local_bytes
from danlu.storage.checkpoint.staging import copy_to_host
from danlu.storage.store.base import Store

PROBE_BYTES = 64 << 20
"""Most bytes that a host writes, and that a rank copies, to measure the speed."""
_MIN_PROBE_BYTES = 4096


class PreflightError(RuntimeError):
    """Checkpoints could not be saved; raised before the first step, with what to do."""


@dataclass(frozen=True)
class SaveEstimate:
    """Estimated cost of a save; the same on every rank."""

    bytes: int
    """Bytes of a save, over all ranks."""
    seconds: float
    """Time to write it, at the measured speed."""
    stall: float
    """Seconds the training will wait: the copy of the slowest rank."""
    bandwidth: float
    """Bytes per second of all hosts together, or their limit."""
    free_bytes: int | None
    host_memory_bytes: int = 0
    """Bytes of host memory reserved for saves, over all hosts: buffers, and copies for other hosts."""

    def optimal_interval(self, between_failures: float) -> float:
        """Seconds between saves that lose the least time to failures, by Young (1974); never less than a save takes."""
        return max(self.seconds, sqrt(2 * self.seconds * between_failures))


def probe_save_cost(
    checkpoints: CheckpointEngine, tensors: Mapping[str, Tensor], *, first_on_host: bool
) -> SaveEstimate:
    """Allocate memory for saves, write and remove probe files, and estimate what a save costs; called by all ranks.

    Raises `PreflightError` on all ranks if the store or the memory of any cannot hold a save.
    """
    store, keep = checkpoints.store, checkpoints.checkpoint_dir.keep
    failure, mine = "", 0
    world = checkpoints.world
    try:
        mine = checkpoints.allocate_staging(tensors, first_on_host=first_on_host)
    except OSError as error:
        failure = (
            f"this host's memory must hold {STAGING_BUFFERS} copies of what a rank saves, but does not: {error}; "
            "raise the container's or /dev/shm's size"
        )
    stall = mine / _copy_speed(tensors) if not failure else 0.0
    speed = 0.0
    if first_on_host and not failure:
        try:
            speed = _write_speed(store, mine, exclusive=world.rank == 0)
        except (OSError, ValueError) as error:
            failure = f"{store.name} cannot be written: {error}; use another store or fix this one"
    total, bandwidth = world.all_reduce_ints([mine, round(speed)])
    free = store.free_bytes() if not failure and world.rank == 0 else None
    if free is not None and free < (
        needed := total * max(1, keep + 1 - len(checkpoints.checkpoint_dir.resumable_steps()))
    ):
        failure = (
            f"{store.name} needs space for {keep} checkpoints and the one being written, {format_bytes(needed)} more, "
            f"but has {format_bytes(free)}; free some space, or lower `checkpoint.keep`"
        )
    micros, failed = world.all_reduce_ints([round(stall * 1e6), bool(failure)], "max")
    if failed:
        raise PreflightError(failure or f"another rank cannot save to {store.name}; see its log")
    if limit := checkpoints.policy.bandwidth:
        bandwidth = min(bandwidth, round(limit * world.size))
    memory = total * (STAGING_BUFFERS + checkpoints.has_peer_replicas)
    return SaveEstimate(total, total / max(bandwidth, 1), micros / 1e6, bandwidth, free, memory)


def _write_speed(store: Store, mine: int, *, exclusive: bool) -> float:
    """Bytes per second of one file, written like a pack; removed when this returns."""
    name = f"preflight-{secrets.token_hex(8)}"
    try:
        if exclusive:  # a manifest is created, never overwritten: the store must support that
            store.create(f"{name}.mark", b"danlu")
        content = np.random.default_rng().bytes(min(PROBE_BYTES, max(mine, _MIN_PROBE_BYTES)))
        began = time.perf_counter()
        store.write(f"{name}.probe", [content])
        return len(content) / max(time.perf_counter() - began, 1e-9)
    finally:
        for end in (".mark", ".probe"):
            store.remove(name + end)


def _copy_speed(tensors: Mapping[str, Tensor]) -> float:
    """Bytes per second at which this rank's tensors are copied into host memory and hashed."""
    target = memoryview(bytearray(b"1" * CHUNK_BYTES))  # no zeros: pages that are really allocated
    done, began = 0, time.perf_counter()
    for tensor in tensors.values():
        part = local_bytes(tensor)[:CHUNK_BYTES]
        if part.numel():
            copy_to_host(part, target[: part.numel()])
            done += part.numel()
        if done >= PROBE_BYTES:
            break
    return max(done, 1) / max(time.perf_counter() - began, 1e-9)
