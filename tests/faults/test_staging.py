"""The memory that saves are copied into, when somebody still holds a part of it."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from danlu.storage.checkpoint.parity_groups import group_writers, parity_group_of_writer
from danlu.storage.checkpoint.staging_buffers import StagingBuffer, StagingBufferPool


def test_memory_that_a_failed_upload_still_holds_is_given_back_later(tmp_path: Path) -> None:
    slot = StagingBuffer(tmp_path / "slot", 100)
    held = slot.view[:10]
    slot.close()
    assert not (tmp_path / "slot").exists()
    assert bytes(held) == bytes(10), "whoever holds it can still read it"


def test_what_a_dead_process_published_goes_when_the_next_takes_memory(tmp_path: Path) -> None:
    alive = StagingBuffer(tmp_path / "000001-0", 100)
    published = tmp_path / "step-00000004" / "00c0ffee-000003.pack"
    lines = f"""
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from danlu.storage.checkpoint.staging_buffers import StagingBuffer
StagingBuffer(Path("{tmp_path}/000003-0"), 100).publish(Path("{published}"))
os._exit(9)
"""
    assert subprocess.run([sys.executable, "-c", lines], check=False).returncode == 9
    assert published.exists() and (tmp_path / "000003-0").exists()
    mine = StagingBufferPool(tmp_path, 0, 2)
    mine.allocate(100)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["000000-0", "000000-1", "000001-0"]
    mine.close()
    alive.close()


def test_a_name_that_is_taken_back_leaves_no_empty_folder(tmp_path: Path) -> None:
    slot = StagingBuffer(tmp_path / "000000-0", 100)
    slot.publish(tmp_path / "step-00000004" / "00c0ffee-000000.pack")
    slot.unpublish()
    assert [path.name for path in tmp_path.iterdir()] == ["000000-0"]


def test_every_group_has_one_keeper_who_is_of_another_where_there_is_one() -> None:
    for writers, size in ((1, 8), (2, 2), (9, 4), (64, 8)):
        kept = {parity_group_of_writer(writer, writers, size): writer for writer in range(writers)}
        kept.pop(None, None)
        held = [writer for group in kept for writer in group_writers(group, writers, size)]
        assert sorted(held) == list(range(writers)), "each in one group"
        assert all(len(group_writers(group, writers, size)) <= size for group in kept)
        assert len(kept) == 1 or all(
            keeper not in group_writers(group, writers, size) for group, keeper in kept.items()
        )


def test_ranks_of_a_host_publish_and_take_back_in_one_folder(tmp_path: Path) -> None:
    """One gives a save up while the other only begins it: the folder is gone when it has just been made."""
    buffers = [StagingBuffer(tmp_path / f"{rank:06d}-0", 10) for rank in range(2)]
    folder = tmp_path / "step-00000010"

    def publish_again_and_again(rank: int) -> None:
        for _ in range(2000):
            buffers[rank].publish(folder / f"{rank:06d}.pack")
            buffers[rank].unpublish()

    with ThreadPoolExecutor(2) as ranks:
        for done in [ranks.submit(publish_again_and_again, rank) for rank in range(2)]:
            done.result()
    for buffer in buffers:
        buffer.close()
    assert not any(tmp_path.iterdir())
