"""The memory that saves are copied into, when somebody still holds a part of it."""

from pathlib import Path

from danlu.storage.checkpoint.slots import Slot


def test_memory_that_a_failed_upload_still_holds_is_given_back_later(tmp_path: Path) -> None:
    slot = Slot(tmp_path / "slot", 100)
    held = slot.view[:10]
    slot.close()
    assert not (tmp_path / "slot").exists()
    assert bytes(held) == bytes(10), "whoever holds it can still read it"
