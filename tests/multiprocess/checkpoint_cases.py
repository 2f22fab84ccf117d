"""Checkpoints that ranks save and load together: the cases of `collective_rank.py` that are about them."""

import re
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from danlu.comm.world import World
from danlu.storage.checkpoint import async_saver
from danlu.storage.checkpoint.async_saver import SavePolicy
from danlu.storage.checkpoint.engine import CheckpointEngine, open_checkpoint_engine
from danlu.storage.checkpoint.host_memory import staging_folder
from danlu.storage.checkpoint.pack_summary import PackSummary, summarize_pack
from danlu.storage.store.base import open_store
from danlu.storage.store.local_store import LocalStore


def normal(*shape: int, seed: int = 0) -> Tensor:
    """The same numbers on every rank."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def tensors(seed: int, placement: Placement) -> dict[str, Tensor]:
    """A matrix that does not divide over two ranks, one that every rank holds, and a counter."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {
        "model.blocks.0.weight": distribute_tensor(normal(5, 3, seed=seed), mesh, [placement]),
        "model.norm": distribute_tensor(normal(4, seed=seed + 1), mesh, [Replicate()]),
        "optimizer.step": torch.tensor(float(seed)),
    }


def whole(held: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: x.full_tensor() if isinstance(x, DTensor) else x for name, x in held.items()}


def checkpoints_in(folder: Path) -> CheckpointEngine:
    return open_checkpoint_engine(folder / "checkpoints", 2, World.adopt())


def refused(message: str, act: Callable[[], Any]) -> None:
    with pytest.raises(RuntimeError, match=re.escape(message)):
        act()


def save_and_load(folder: Path) -> None:
    checkpoints = checkpoints_in(folder)
    assert checkpoints.latest_step() is None and checkpoints.checkpoint_dir.resumable_steps() == []
    saved = tensors(10, Shard(0))
    outcome = checkpoints.save(10, saved, {"step": 10, "cursor": 80})
    assert outcome.path == str(folder / "checkpoints" / "step-00000010")
    refused(
        "exists already; it is not changed" if dist.get_rank() == 0 else "could not be saved by another rank",
        lambda: checkpoints.save(10, tensors(11, Shard(0)), {}),
    )
    read = tensors(99, Shard(1))
    scalars, proof = checkpoints.load(10, read)
    assert scalars == {"step": 10, "cursor": 80}
    assert proof.tensors_verified == 3
    expected = whole(saved)
    for name, tensor in whole(read).items():
        assert torch.equal(tensor, expected[name]), name
    dist.barrier()
    checkpoints.close()


def a_save_that_was_cut_short(folder: Path) -> None:
    """What it left is never taken for a checkpoint, and does not mix with the next save of that step."""
    checkpoints = checkpoints_in(folder)
    left = folder / "checkpoints" / "step-00000020"
    if dist.get_rank() == 0:
        left.mkdir()
        (left / "00000000-000000.pack").write_text("half of it")
        (left / "00000000-000000.json").write_text("{}")
    dist.barrier()
    assert checkpoints.checkpoint_dir.resumable_steps() == [10] and checkpoints.latest_step() == 10
    checkpoints.save(20, tensors(20, Shard(0)), {"step": 20})
    assert checkpoints.load(20, tensors(99, Shard(0)))[0] == {"step": 20}
    assert checkpoints.checkpoint_dir.resumable_steps() == [10, 20]
    checkpoints.close()  # or the next case would read from memory what the disk has lost


def a_flipped_bit_is_found_by_all(folder: Path) -> None:
    """Also by the ranks that read nothing of what is damaged."""
    checkpoints = checkpoints_in(folder)  # a new one: nothing of it is in memory
    if dist.get_rank() == 0:
        pack = sorted((folder / "checkpoints" / "step-00000020").glob("*-000001.pack"))[-1]
        content = bytearray(pack.read_bytes())
        content[3] ^= 1
        pack.write_bytes(content)
    dist.barrier()
    refused("corrupt", lambda: checkpoints.load(20, tensors(99, Shard(0))))
    if dist.get_rank() == 0:
        content[3] ^= 1
        pack.write_bytes(content)
    dist.barrier()


def a_lost_pack_is_mended_from_parity(folder: Path) -> None:
    checkpoints = open_checkpoint_engine(
        folder / "parity", 2, World.adopt(), policy=SavePolicy(parity=1, parity_group_size=2)
    )
    saved = tensors(10, Shard(0))
    checkpoints.save(10, saved, {"step": 10})
    checkpoints.close()  # the copy in memory goes with it
    dist.barrier()
    if dist.get_rank() == 0:
        (pack,) = (folder / "parity" / "step-00000010").glob("*-000001.pack")
        pack.unlink()
    dist.barrier()
    again = open_checkpoint_engine(folder / "parity", 2, World.adopt())
    read = tensors(99, Shard(1))
    again.load(10, read)
    expected = whole(saved)
    for name, tensor in whole(read).items():
        assert torch.equal(tensor, expected[name]), name
    assert any("reconstructed from parity" in line for line in again.repairs)
    again.close()


def memory_serves_what_the_disk_lost(folder: Path) -> None:
    """While a rank's buffers are there, they are the nearest copy, and the one that is right."""
    checkpoints = open_checkpoint_engine(folder / "memory", 2, World.adopt())
    saved = tensors(10, Shard(0))
    checkpoints.save(10, saved, {"step": 10})
    dist.barrier()
    if dist.get_rank() == 0:
        for pack in (folder / "memory" / "step-00000010").glob("*.pack"):
            pack.write_bytes(b"")
    dist.barrier()
    read = tensors(99, Shard(1))
    checkpoints.load(10, read)
    expected = whole(saved)
    for name, tensor in whole(read).items():
        assert torch.equal(tensor, expected[name]), name
    dist.barrier()
    checkpoints.close()


def as_two_hosts(folder: Path, policy: SavePolicy | None = None) -> CheckpointEngine:
    """Every rank as if it had a host of its own, with its own memory."""
    memory = folder / f"host-{dist.get_rank()}"
    made = CheckpointEngine(open_store(str(folder / "far")), 2, World.adopt(), staging=memory, policy=policy)
    book = PrefixStore(f"hosts-{len(list(folder.glob('opened-*')))}", dist.distributed_c10d._get_default_store())
    made.enable_peer_replicas(book, 0, "127.0.0.1:9")
    dist.barrier()
    (folder / f"opened-{dist.get_rank()}-{time.time_ns()}").touch()
    dist.barrier()
    return made


def a_lost_host_is_served_from_anothers_memory(folder: Path) -> None:
    """Rank 1's host is gone with all its memory, and the far store has lost its packs: rank 0's host has them."""
    folder = folder / "hosts"
    folder.mkdir(exist_ok=True)
    dist.barrier()
    checkpoints = as_two_hosts(folder)
    saved = tensors(10, Shard(0))
    checkpoints.save(10, saved, {"step": 10})
    outcome = checkpoints.save(20, tensors(20, Shard(0)), {"step": 20})
    assert not outcome.post_commit_error, outcome.post_commit_error
    mine = folder / f"host-{dist.get_rank()}"
    names = sorted(path.name[9:] for path in (mine / "step-00000020").iterdir())
    assert names == ["000000.pack", "000001.pack"], "its own and a copy of the other's"
    copies = {path.name[9:] for path in mine.glob("step-00000010/*")} - {f"{dist.get_rank():06d}.pack"}
    assert not copies, "the newest only"
    # Both processes die without a word: nothing is withdrawn. One host is replaced by an empty one.
    checkpoints._saver.peer_replicas.close()  # type: ignore[union-attr]
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder / "host-1")
        for pack in (folder / "far" / "step-00000020").glob("*.pack"):
            pack.unlink()
    dist.barrier()
    again = as_two_hosts(folder)
    read = tensors(99, Shard(1))
    again.load(20, read)
    expected = whole(tensors(20, Shard(0)))
    for name, tensor in whole(read).items():
        assert torch.equal(tensor, expected[name]), name
    (source,) = again.bytes_by_store
    assert source.startswith("peer ") if dist.get_rank() == 1 else source == str(folder / "host-0"), source
    dist.barrier()
    again.close()
    checkpoints.close()
    assert not mine.exists(), "the copy of the other's packs goes too"


def the_hosts_own_disk_serves_what_the_store_lost(folder: Path) -> None:
    near = folder / "near"

    def opened() -> CheckpointEngine:
        return open_checkpoint_engine(folder / "away", 2, World.adopt(), policy=SavePolicy(local_copy_folder=near))

    checkpoints = opened()
    checkpoints.save(10, tensors(10, Shard(0)), {})
    checkpoints.save(20, tensors(20, Shard(0)), {})
    checkpoints.close()  # the copies in memory go with it
    assert sorted(path.name[9:] for path in near.glob("*/*")) == ["000000.pack", "000001.pack"], "the newest only"
    dist.barrier()
    if dist.get_rank() == 0:
        for pack in (folder / "away" / "step-00000020").glob("*.pack"):
            pack.unlink()
    dist.barrier()
    again = opened()
    read = tensors(99, Shard(1))
    again.load(20, read)
    expected = whole(tensors(20, Shard(0)))
    for name, tensor in whole(read).items():
        assert torch.equal(tensor, expected[name]), name
    assert list(again.bytes_by_store) == [str(near)]
    again.close()


def what_is_not_finite_is_set_aside(folder: Path) -> None:
    checkpoints = checkpoints_in(folder)
    broken = tensors(30, Shard(0))
    if dist.get_rank() == 1:
        broken["model.blocks.0.weight"].to_local()[0, 0] = float("nan")
    refused(
        "non-finite elements, and was quarantined" if dist.get_rank() == 0 else "could not be saved by another rank",
        lambda: checkpoints.save(30, broken, {"step": 30}),
    )
    assert checkpoints.latest_step() == 20
    assert checkpoints.checkpoint_dir.quarantined_steps() == [30]


def a_save_that_fails_on_one_rank_is_given_up_on_all(folder: Path) -> None:
    checkpoints = checkpoints_in(folder)
    write = checkpoints.store.write
    if dist.get_rank() == 1:

        def refuse(path: str, parts: Any) -> None:
            raise OSError(28, "No space left on device")

        checkpoints.store.write = refuse  # type: ignore[method-assign]
    refused(
        "step-00000035" if dist.get_rank() == 0 else "No space left",
        lambda: checkpoints.save(35, tensors(35, Shard(0)), {"step": 35}),
    )
    checkpoints.store.write = write  # type: ignore[method-assign]
    assert checkpoints.latest_step() == 20


def in_the_background(folder: Path) -> None:
    """The state may change once it has settled; what is saved is what it was."""
    checkpoints = checkpoints_in(folder)
    saved = tensors(40, Shard(0))
    assert checkpoints.async_save(40, saved, {"step": 40}, overlap=True)
    checkpoints.wait_for_staging()
    for tensor in saved.values():
        tensor.zero_()
    checkpoints.wait_for_saves()
    (outcome,) = checkpoints.pop_results()
    assert not outcome.error and outcome.stall < outcome.seconds
    assert checkpoints.checkpoint_dir.resumable_steps() == [20, 40]
    assert not (folder / "checkpoints" / "step-00000010").exists()
    checkpoints.close()
    dist.barrier()
    assert not staging_folder(str((folder / "checkpoints").resolve())).exists(), "nothing stays in the host's memory"


class Lagging(LocalStore):
    """Reads packs back late, or not at all."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.may_read, self.broken = threading.Event(), False
        self.may_read.set()

    def read_into(self, path: str, offset: int, into: memoryview) -> None:
        assert self.may_read.wait(60)
        if self.broken:
            raise OSError(5, "Input/output error")
        super().read_into(path, offset, into)


def older_ones_stay_until_all_ranks_have_read_back(folder: Path) -> None:
    """First one rank is late, then it cannot read at all; the other has read its own part back each time."""
    store, last = Lagging(folder / "lagging"), dist.get_rank() == 1
    checkpoints = CheckpointEngine(store, 1, World.adopt(), staging=folder / f"lagging-{dist.get_rank()}")
    checkpoints.save(10, tensors(10, Shard(0)), {})
    if last:
        store.may_read.clear()
    assert checkpoints.async_save(20, tensors(20, Shard(0)), {})
    deadline = time.monotonic() + 180
    while not last and checkpoints._saver.verified_step < 20:
        assert time.monotonic() < deadline, "rank 0 has nobody to wait for"
        time.sleep(0.01)
    dist.barrier()
    assert checkpoints.async_save(30, tensors(30, Shard(0)), {})  # here ranks tell each other what they have read back
    checkpoints._saver.wait_for_purge()
    dist.barrier()
    assert 10 in checkpoints.checkpoint_dir.resumable_steps(), "one rank has read back step 20, and one has not"
    store.may_read.set()
    checkpoints.wait_for_saves()
    dist.barrier()
    assert checkpoints.checkpoint_dir.resumable_steps() == [30]
    store.broken = last
    checkpoints.async_save(40, tensors(40, Shard(0)), {})
    checkpoints.wait_for_saves()
    dist.barrier()
    assert checkpoints.checkpoint_dir.resumable_steps() == [30, 40], "one rank could not read back step 40"
    store.broken = False
    checkpoints.save(50, tensors(50, Shard(0)), {})
    dist.barrier()
    assert checkpoints.checkpoint_dir.resumable_steps() == [50]
    checkpoints.close()


FINGERPRINTS = "model.rows must have the fingerprints that were saved, but 1 of 2 tensors differ"


def rows(placement: Placement) -> dict[str, Tensor]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    found = {"model.rows": normal(4, 3), "model.norm": normal(4, 2, seed=1)}
    return {name: distribute_tensor(tensor, mesh, [placement]) for name, tensor in found.items()}


def tensors_that_differ_under_chunks_that_verify(folder: Path) -> None:
    """Each rank takes itself for the other: what is there is whole and every chunk is right, but rows change places."""

    def exchanged(*arguments: Any) -> PackSummary:
        weighed = summarize_pack(*arguments)
        held = weighed.tensors["model.rows"]
        (chunk,) = held.chunks
        moved = chunk.model_copy(update={"offset": (2 - chunk.offset[0], 0)})
        return replace(weighed, tensors=weighed.tensors | {"model.rows": held.model_copy(update={"chunks": (moved,)})})

    checkpoints = open_checkpoint_engine(folder / "exchanged", 2, World.adopt())
    with patch.object(async_saver, "summarize_pack", exchanged):
        outcome = checkpoints.save(10, rows(Shard(0)), {})
    assert not outcome.post_commit_error, outcome.post_commit_error
    for placement in (Shard(0), Shard(1), Replicate()):
        refused(FINGERPRINTS, lambda placement=placement: checkpoints.load(10, rows(placement)))
    checkpoints.close()


def load_on_one_rank_what_differs(folder: Path) -> None:
    checkpoints = open_checkpoint_engine(folder / "exchanged", 2, World.adopt())
    refused(
        FINGERPRINTS, lambda: checkpoints.load(10, {"model.rows": torch.zeros(4, 3), "model.norm": torch.zeros(4, 2)})
    )
    refused(
        "model.rows must have the fingerprints that were saved, but 1 of 1 tensors differ",
        lambda: checkpoints.load_full(10, {"model.rows": torch.zeros(4, 3)}),
    )
    checkpoints.load_full(10, {"model.norm": torch.zeros(4, 2)})
    checkpoints.close()


def load_on_one_rank(folder: Path) -> None:
    """What two ranks saved, in one process and without a mesh."""
    checkpoints = checkpoints_in(folder)
    read = {"model.blocks.0.weight": torch.zeros(5, 3), "model.norm": torch.zeros(4), "optimizer.step": torch.zeros(())}
    assert checkpoints.load(40, read)[0] == {"step": 40}
    assert torch.equal(read["model.blocks.0.weight"], normal(5, 3, seed=40))
    assert torch.equal(read["model.norm"], normal(4, seed=41))
    assert read["optimizer.step"] == 40
