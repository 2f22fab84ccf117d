"""What runs leave in this host's memory: nothing after a clean one; a dead one, for a while, what its resume needs."""

import errno
import multiprocessing
import os
import signal
import stat
import time
from pathlib import Path

import pytest
import torch

from danlu.comm.world import World
from danlu.spec import RunFolder
from danlu.storage.checkpoint.engine import CheckpointEngine, open_checkpoint_engine
from danlu.storage.checkpoint.host_memory import (
    RESUME_GRACE_SECONDS,
    StagingInUseError,
    free_run_memory,
    make_private_folder,
    reclaim_dead_runs,
    remove_dead_buffers,
    staging_folder,
)
from danlu.storage.checkpoint.staging_buffers import StagingBufferPool
from danlu.storage.store.base import open_store

SIZE = 3 << 20


def dead_run(folder: Path) -> Path:
    """A process that took buffers in `folder`, published one of them, and died."""
    child = os.fork()
    if child == 0:
        try:
            slots = StagingBufferPool(folder, 0, 2, owner="/runs/dead/checkpoints")
            slots.allocate(SIZE)
            slots.acquire(1).publish(folder / "step-00000004" / "00c0ffee-000000.pack")
        finally:  # never back into the tests of the process this was forked from
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    assert len(list(folder.glob("000000-*"))) == 2 and list(folder.glob("step-*/*"))
    return folder


def aged(folder: Path, seconds: float) -> None:
    os.utime(folder, (time.time() - seconds,) * 2)


@pytest.fixture
def memory(tmp_path: Path) -> Path:
    return tmp_path / "danlu-0"


def test_a_clean_run_leaves_nothing(tmp_path: Path) -> None:
    where = tmp_path / "checkpoints"
    checkpoints = open_checkpoint_engine(where, 2, World.adopt())
    state = {"weight": torch.ones(1000)}
    checkpoints.allocate_staging(state)
    folder = staging_folder(str(where.resolve()))
    assert folder.exists()
    checkpoints.save(1, state, {})
    checkpoints.close()
    assert not folder.exists()


def test_the_last_run_of_a_user_takes_the_users_folder_with_it(memory: Path) -> None:
    first, second = StagingBufferPool(memory / ("0" * 16), 0, 1), StagingBufferPool(memory / ("1" * 16), 0, 1)
    first.allocate(100)
    second.allocate(100)
    first.close()
    assert [path.name for path in memory.iterdir()] == ["1" * 16]
    second.close()
    assert not memory.exists()


def test_what_others_put_into_the_memory_of_a_host_goes_with_its_last_rank(memory: Path) -> None:
    """Copies of another host's packs are no buffers of anybody here."""
    folder = memory / ("0" * 16)
    ranks = [StagingBufferPool(folder, rank, 1) for rank in (0, 1)]
    for slots in ranks:
        slots.allocate(100)
    (folder / "step-00000004").mkdir()
    (folder / "step-00000004" / "00c0ffee-000007.pack").write_bytes(b"of another host")
    ranks[0].close()
    assert (folder / "step-00000004" / "00c0ffee-000007.pack").exists(), "rank 1 may still read it"
    ranks[1].close()
    assert not memory.exists()


def test_ranks_that_end_together_clear_the_same_folder(memory: Path) -> None:
    """Each may find a folder that another removes at that moment; none may stumble over it."""
    fork = multiprocessing.get_context("fork")
    for attempt in range(20):
        folder = memory / f"{attempt:016x}"
        for step in range(3):
            copies = folder / f"step-{step:08d}" / "parity"
            copies.mkdir(parents=True)
            for rank in range(40):
                (copies / f"00c0ffee-{rank:06d}.pack").write_bytes(b"x")
        ranks = [fork.Process(target=remove_dead_buffers, args=(folder,)) for _ in range(2)]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join()
        assert [rank.exitcode for rank in ranks] == [0, 0]
        assert not folder.exists()


def test_memory_is_private(memory: Path) -> None:
    memory.mkdir(mode=0o755)  # as an older release left it
    slots = StagingBufferPool(memory / ("0" * 16), 0, 1)
    slots.allocate(100)
    for folder in (memory, memory / ("0" * 16)):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE((memory / ("0" * 16) / "000000-0").stat().st_mode) == 0o600
    slots.close()


def test_a_link_where_memory_should_be_is_refused(memory: Path, tmp_path: Path) -> None:
    """Anybody may make names in /dev/shm: one that leads elsewhere would give the state away."""
    (tmp_path / "theirs").mkdir()
    memory.symlink_to(tmp_path / "theirs")
    with pytest.raises(PermissionError, match=r"danlu-0 must be a folder of user \d+, .* but is not a folder; have it"):
        StagingBufferPool(memory / ("0" * 16), 0, 1).allocate(100)
    assert not list((tmp_path / "theirs").iterdir())


def test_memory_of_another_user_is_refused(memory: Path) -> None:
    theirs = Path("/usr")
    if os.getuid() == 0:
        theirs = memory
        theirs.mkdir()
        os.chown(theirs, 54321, 54321)
    with pytest.raises(PermissionError, match=r"but is of user \d+; have it removed"):
        make_private_folder(theirs)


def test_leftovers_of_dead_runs_are_swept_and_told(memory: Path) -> None:
    mine, other, fresh, alive = (memory / (digit * 16) for digit in "0123")
    for folder in (mine, other, fresh):
        dead_run(folder)
    held = StagingBufferPool(alive, 0, 1)
    held.allocate(100)
    strange = memory / "somebody-elses"
    strange.mkdir()
    for folder in (mine, other, alive, strange):
        aged(folder, RESUME_GRACE_SECONDS + 5)
    (found,) = reclaim_dead_runs(mine)
    assert found.bytes == 2 * SIZE and found.owner == "/runs/dead/checkpoints" and found.folder == other
    assert str(found) == f"freed 6.3 MB in {other}, left by a dead run that saved to /runs/dead/checkpoints"
    assert sorted(memory.iterdir()) == [mine, fresh, alive, strange], "what a resume needs, and what is not ours, stays"
    held.close()


def test_a_run_that_starts_sweeps_and_tells_once_a_host(memory: Path, tmp_path: Path) -> None:
    dead_run(memory / ("1" * 16))
    aged(memory / ("1" * 16), RESUME_GRACE_SECONDS + 5)
    store, state = open_store(str(tmp_path / "checkpoints")), {"weight": torch.ones(1000)}
    second = CheckpointEngine(store, 2, World.adopt(), staging=memory / ("0" * 16))
    second.allocate_staging(state, first_on_host=False)
    assert not second.pop_warnings() and (memory / ("1" * 16)).exists()
    first = CheckpointEngine(store, 2, World.adopt(), staging=memory / ("0" * 16))
    first.allocate_staging(state)
    assert ["left by a dead run that saved to /runs/dead/checkpoints" in line for line in first.pop_warnings()] == [
        True
    ]
    first.close()
    second.close()
    assert not memory.exists()


def test_where_memory_is_short_dead_runs_give_theirs_at_once(tmp_path: Path) -> None:
    """Their state is in their store; a run that cannot start would be worse than a resume that reads from there."""
    memory = staging_folder(str(tmp_path)).parents[1] / f"danlu-{os.getpid()}"
    room = os.statvfs(memory.parent)
    too_much = torch.zeros(1).expand(room.f_blocks * room.f_frsize // 4 + 1)  # one element, seen very often
    dead_run(memory / ("1" * 16))
    store = open_store(str(tmp_path / "checkpoints"))
    mine = CheckpointEngine(store, 2, World.adopt(), staging=memory / ("0" * 16))
    with pytest.raises(OSError) as full:
        mine.allocate_staging({"weight": too_much})
    assert full.value.errno == errno.ENOSPC
    assert ["left by a dead run" in line for line in mine.pop_warnings()] == [True]
    assert not (memory / ("1" * 16)).exists()
    mine.close()
    assert not memory.exists()


def test_a_run_s_memory_is_released_unless_it_lives(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")
    folder = staging_folder(str(run.checkpoints.resolve()))
    assert free_run_memory(run) == 0
    dead_run(folder)
    assert free_run_memory(run) == 2 * SIZE
    assert not folder.exists()
    alive = StagingBufferPool(folder, 0, 1)
    alive.allocate(100)
    with pytest.raises(StagingInUseError, match=r"a process of run .* is alive on this host; stop the run first"):
        free_run_memory(run)
    alive.close()
