"""Checkpoints that ranks save and load together: the cases of `collective_rank.py` that are about them."""

import re
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from danlu.storage.checkpoint.checkpoints import Checkpoints, open_checkpoints
from danlu.storage.checkpoint.saver import Policy
from danlu.storage.store import open_store


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


def checkpoints_in(folder: Path) -> Checkpoints:
    return open_checkpoints(folder / "checkpoints", 2, torch.device("cpu"))


def refused(message: str, act: Callable[[], Any]) -> None:
    with pytest.raises(RuntimeError, match=re.escape(message)):
        act()


def save_and_load(folder: Path) -> None:
    checkpoints = checkpoints_in(folder)
    assert checkpoints.latest() is None and checkpoints.shelf.steps() == []
    saved = tensors(10, Shard(0))
    outcome = checkpoints.save(10, saved, {"step": 10, "cursor": 80})
    assert outcome.path == str(folder / "checkpoints" / "step-00000010")
    refused(
        "exists already; it is left as it is" if dist.get_rank() == 0 else "could not be saved by another rank",
        lambda: checkpoints.save(10, tensors(11, Shard(0)), {}),
    )
    read = tensors(99, Shard(1))
    scalars, proof = checkpoints.load(10, read)
    assert scalars == {"step": 10, "cursor": 80}
    assert proof.tensors == 3
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
    assert checkpoints.shelf.steps() == [10] and checkpoints.latest() == 10
    checkpoints.save(20, tensors(20, Shard(0)), {"step": 20})
    assert checkpoints.load(20, tensors(99, Shard(0)))[0] == {"step": 20}
    assert checkpoints.shelf.steps() == [10, 20]
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
    refused("damaged", lambda: checkpoints.load(20, tensors(99, Shard(0))))
    if dist.get_rank() == 0:
        content[3] ^= 1
        pack.write_bytes(content)
    dist.barrier()


def a_lost_pack_is_mended_from_parity(folder: Path) -> None:
    checkpoints = open_checkpoints(folder / "parity", 2, torch.device("cpu"), policy=Policy(parity=1, group=2))
    saved = tensors(10, Shard(0))
    checkpoints.save(10, saved, {"step": 10})
    checkpoints.close()  # the copy in memory goes with it
    dist.barrier()
    if dist.get_rank() == 0:
        (pack,) = (folder / "parity" / "step-00000010").glob("*-000001.pack")
        pack.unlink()
    dist.barrier()
    again = open_checkpoints(folder / "parity", 2, torch.device("cpu"))
    read = tensors(99, Shard(1))
    again.load(10, read)
    expected = whole(saved)
    for name, tensor in whole(read).items():
        assert torch.equal(tensor, expected[name]), name
    assert any("mended from parity" in line for line in again.mended)
    again.close()


def memory_serves_what_the_disk_lost(folder: Path) -> None:
    """While a rank's buffers are there, they are the nearest copy, and the one that is right."""
    checkpoints = open_checkpoints(folder / "memory", 2, torch.device("cpu"))
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


def as_two_hosts(folder: Path, policy: Policy | None = None) -> Checkpoints:
    """Every rank as if it had a host of its own, with its own memory."""
    memory = folder / f"host-{dist.get_rank()}"
    made = Checkpoints(open_store(str(folder / "far")), 2, torch.device("cpu"), staging=memory, policy=policy)
    book = PrefixStore(f"hosts-{len(list(folder.glob('opened-*')))}", dist.distributed_c10d._get_default_store())
    made.meet_neighbours(book, 0, "127.0.0.1:9")
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
    assert not outcome.trouble, outcome.trouble
    mine = folder / f"host-{dist.get_rank()}"
    names = sorted(path.name[9:] for path in (mine / "step-00000020").iterdir())
    assert names == ["000000.pack", "000001.pack"], "its own and a copy of the other's"
    copies = {path.name[9:] for path in mine.glob("step-00000010/*")} - {f"{dist.get_rank():06d}.pack"}
    assert not copies, "the newest only"
    # Both processes die without a word: nothing is withdrawn. One host is replaced by an empty one.
    checkpoints._saver.neighbours.close()  # type: ignore[union-attr]
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
    (source,) = again.read_from
    assert source.startswith("peer ") if dist.get_rank() == 1 else source == str(folder / "host-0"), source
    dist.barrier()
    again.close()
    checkpoints.close()


def the_hosts_own_disk_serves_what_the_store_lost(folder: Path) -> None:
    near = folder / "near"

    def opened() -> Checkpoints:
        return open_checkpoints(folder / "away", 2, torch.device("cpu"), policy=Policy(near=near))

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
    assert list(again.read_from) == [str(near)]
    again.close()


def what_is_not_finite_is_set_aside(folder: Path) -> None:
    checkpoints = checkpoints_in(folder)
    broken = tensors(30, Shard(0))
    if dist.get_rank() == 1:
        broken["model.blocks.0.weight"].to_local()[0, 0] = float("nan")
    refused(
        "not finite, and is set aside" if dist.get_rank() == 0 else "could not be saved by another rank",
        lambda: checkpoints.save(30, broken, {"step": 30}),
    )
    assert checkpoints.latest() == 20
    assert checkpoints.shelf.quarantined() == [30]


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
    assert checkpoints.latest() == 20


def in_the_background(folder: Path) -> None:
    """The state may change once it has settled; what is saved is what it was."""
    checkpoints = checkpoints_in(folder)
    saved = tensors(40, Shard(0))
    assert checkpoints.begin(40, saved, {"step": 40}, overlap=True)
    checkpoints.settle()
    for tensor in saved.values():
        tensor.zero_()
    checkpoints.wait()
    (outcome,) = checkpoints.outcomes()
    assert not outcome.failure and outcome.stall < outcome.seconds
    assert checkpoints.shelf.steps() == [20, 40]
    assert not (folder / "checkpoints" / "step-00000010").exists()
    checkpoints.close()


def load_on_one_rank(folder: Path) -> None:
    """What two ranks saved, in one process and without a mesh."""
    checkpoints = checkpoints_in(folder)
    read = {"model.blocks.0.weight": torch.zeros(5, 3), "model.norm": torch.zeros(4), "optimizer.step": torch.zeros(())}
    assert checkpoints.load(40, read)[0] == {"step": 40}
    assert torch.equal(read["model.blocks.0.weight"], normal(5, 3, seed=40))
    assert torch.equal(read["model.norm"], normal(4, seed=41))
    assert read["optimizer.step"] == 40
