"""Old checkpoints go once the new one was read back, and what rots later is found in idle time."""

import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest
import torch
from made_checkpoints import attempt_of, content, write_all

from danlu.comm.world import World
from danlu.storage.checkpoint.async_saver import SavePolicy
from danlu.storage.checkpoint.checkpoint_dir import CheckpointDir
from danlu.storage.checkpoint.commit import step_folder
from danlu.storage.checkpoint.engine import CheckpointEngine
from danlu.storage.checkpoint.inspection import verify
from danlu.storage.checkpoint.reader import CheckpointReader
from danlu.storage.checkpoint.scrub import Scrubber, leaves_of_rank
from danlu.storage.store.memory_store import MemoryStore
from danlu.storage.store.safe_path import Buffer


class Forgetful(MemoryStore):
    """Loses a bit of the next packs that it is given."""

    def __init__(self) -> None:
        super().__init__("forgetful")
        self.times = 0

    def write(self, path: str, parts: Iterable[Buffer]) -> None:
        content = bytearray().join(parts)
        if path.endswith(".pack") and self.times:
            self.times -= 1
            content[7] ^= 1
        super().write(path, [content])


@pytest.fixture
def store() -> Forgetful:
    return Forgetful()


@pytest.fixture
def checkpoints(store: Forgetful, tmp_path: Path) -> Iterator[CheckpointEngine]:
    made = CheckpointEngine(store, 1, World.adopt(), staging=tmp_path, policy=SavePolicy(parity=1))
    yield made
    made.close()


def state() -> dict[str, torch.Tensor]:
    return {"model.weight": torch.arange(5000.0), "model.bias": torch.ones(3)}


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not true():
        assert time.monotonic() < deadline, "it does not come about"
        time.sleep(0.01)


def test_what_the_store_got_wrong_is_written_again_from_memory(store: Forgetful, checkpoints: CheckpointEngine) -> None:
    checkpoints.save(10, state(), {})
    store.times = 1
    checkpoints.save(20, state(), {})
    until(lambda: checkpoints.checkpoint_dir.resumable_steps() == [20])
    assert ["was not what had been written; it was written again" in line for line in checkpoints.pop_warnings()] == [
        True
    ]
    found = {name: torch.zeros_like(tensor) for name, tensor in state().items()}
    checkpoints.load(20, found)
    assert all(torch.equal(found[name], tensor) for name, tensor in state().items())


def test_older_ones_stay_while_the_new_one_is_not_proven(store: Forgetful, checkpoints: CheckpointEngine) -> None:
    checkpoints.save(10, state(), {})
    store.times = 2
    assert "older ones are kept" in checkpoints.save(20, state(), {}).post_commit_error
    assert checkpoints.checkpoint_dir.resumable_steps() == [10, 20]
    checkpoints.save(30, state(), {})
    until(lambda: checkpoints.checkpoint_dir.resumable_steps() == [30])


def test_padding_is_zeros_even_in_memory_that_was_used_before(store: Forgetful, checkpoints: CheckpointEngine) -> None:
    for step, fill in ((1, 1.0), (2, 2.0), (3, 3.0)):  # two buffers: the third save finds the first one's bytes
        tensors = {f"model.{number}": torch.full((step * 7 + number,), fill) for number in range(5)}
        checkpoints.save(step, tensors, {})
        verdict = verify(store, step)
        assert not verdict.faults and not verdict.mendable, verdict


def test_rot_is_found_in_idle_time_and_mended() -> None:
    store = MemoryStore("rot")
    write_all(store, 10, attempt_of(1), content(10, attempt_of(1)), 3, parity=1)
    pack = f"{step_folder(10)}/{attempt_of(1)}-000001.pack"
    right = store.read(pack)
    store.write(pack, [bytes([right[0] ^ 1]) + right[1:]])
    told: list[str] = []
    busy = True
    others = [Scrubber(CheckpointDir(store, 1), rank, 2, 0.01, lambda: False, told.append) for rank in (0,)]
    mine = Scrubber(CheckpointDir(store, 1), 1, 2, 0.01, lambda: busy, told.append)
    for each in (*others, mine):
        each.start()
    time.sleep(0.2)
    assert not told, "it is not this rank's to read, or a save is under way"
    busy = False
    until(lambda: bool(told))
    for each in (*others, mine):
        each.close()
    assert "was corrupt (bit rot found by the scrubber) and was repaired from parity" in told[0]
    assert store.read(pack) == right and not verify(store, 10).mendable


def test_rot_beyond_parity_is_told() -> None:
    store = MemoryStore("beyond")
    write_all(store, 10, attempt_of(1), content(10, attempt_of(1)), 2)
    pack = f"{step_folder(10)}/{attempt_of(1)}-000001.pack"
    store.write(pack, [bytes(store.size(pack))])
    told: list[str] = []
    scrubber = Scrubber(CheckpointDir(store, 1), 0, 1, 0.01, lambda: False, told.append)
    scrubber.start()
    until(lambda: bool(told))
    scrubber.close()
    assert "is corrupt and cannot be repaired" in told[0]


@pytest.mark.parametrize(("writers", "world"), [(3, 2), (1, 4), (130, 5), (70, 70)])
def test_ranks_share_all_leaves(writers: int, world: int) -> None:
    store = MemoryStore("share")
    write_all(store, 10, attempt_of(1), content(10, attempt_of(1), rows=writers), writers)
    reader = CheckpointReader(store, 10)
    found = [[leaf.writer for leaf in leaves_of_rank(reader, reader.manifest, rank, world)] for rank in range(world)]
    assert all(writer % world == rank for rank, mine in enumerate(found) for writer in mine)
    assert sorted(writer for mine in found for writer in mine) == list(range(writers))
