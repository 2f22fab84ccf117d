"""The memory that saves are copied into, when somebody still holds a part of it."""

import os
import subprocess
import sys
from pathlib import Path

from danlu.storage.checkpoint.parity_packs import group_kept_by, writers_of
from danlu.storage.checkpoint.slots import Slot, Slots


def test_memory_that_a_failed_upload_still_holds_is_given_back_later(tmp_path: Path) -> None:
    slot = Slot(tmp_path / "slot", 100)
    held = slot.view[:10]
    slot.close()
    assert not (tmp_path / "slot").exists()
    assert bytes(held) == bytes(10), "whoever holds it can still read it"


def test_what_a_dead_process_published_goes_when_the_next_takes_memory(tmp_path: Path) -> None:
    alive = Slot(tmp_path / "000001-0", 100)
    published = tmp_path / "step-00000004" / "00c0ffee-000003.pack"
    lines = f"""
import os
from pathlib import Path
from danlu.storage.checkpoint.slots import Slot
Slot(Path("{tmp_path}/000003-0"), 100).publish(Path("{published}"))
os._exit(9)
"""
    assert subprocess.run([sys.executable, "-c", lines], check=False).returncode == 9
    assert published.exists() and (tmp_path / "000003-0").exists()
    mine = Slots(tmp_path, 0, 2)
    mine.make(100)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["000000-0", "000000-1", "000001-0"]
    mine.close()
    alive.close()


def test_memory_of_other_runs_that_died_goes_after_a_day(tmp_path: Path) -> None:
    memory = tmp_path / "danlu-0"
    mine, dead, fresh, alive = (memory / (digit * 16) for digit in "0123")
    strange = memory / "somebody-elses"
    for folder in (dead, fresh, strange):
        (folder / "step-00000004").mkdir(parents=True)
        (folder / "000000-0").write_bytes(b"x")
    held = Slot(alive / "000000-0", 100)
    for folder in (dead, alive, strange):
        os.utime(folder, (0, 0))
    slots = Slots(mine, 0, 1)
    slots.make(100)
    assert sorted(memory.iterdir()) == [mine, fresh, alive, strange]
    slots.close()
    held.close()


def test_beside_a_folder_of_another_name_nothing_is_removed(tmp_path: Path) -> None:
    (tmp_path / ("a" * 16)).mkdir()
    os.utime(tmp_path / ("a" * 16), (0, 0))
    slots = Slots(tmp_path / "staging", 0, 1)
    slots.make(100)
    assert (tmp_path / ("a" * 16)).exists()
    slots.close()


def test_a_name_that_is_taken_back_leaves_no_empty_folder(tmp_path: Path) -> None:
    slot = Slot(tmp_path / "000000-0", 100)
    slot.publish(tmp_path / "step-00000004" / "00c0ffee-000000.pack")
    slot.withdraw()
    assert [path.name for path in tmp_path.iterdir()] == ["000000-0"]


def test_every_group_has_one_keeper_who_is_of_another_where_there_is_one() -> None:
    for writers, size in ((1, 8), (2, 2), (9, 4), (64, 8)):
        kept = {group_kept_by(writer, writers, size): writer for writer in range(writers)}
        kept.pop(None, None)
        held = [writer for group in kept for writer in writers_of(group, writers, size)]
        assert sorted(held) == list(range(writers)), "each in one group"
        assert all(len(writers_of(group, writers, size)) <= size for group in kept)
        assert len(kept) == 1 or all(keeper not in writers_of(group, writers, size) for group, keeper in kept.items())
