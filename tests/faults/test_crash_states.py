"""A crash between any two calls of any save: nothing wrong is ever loaded, and what was saved is never lost.

The model is that of `crash_states.py`; `benchmarks/ckpt_crashes.py` looks at many more states.
"""

from itertools import chain
from pathlib import Path
from unittest.mock import patch

import pytest
from crash_campaign import Tally, explore
from crash_states import states
from history import History, Name, Recorder
from made_checkpoints import attempt_of, content, write_all
from scenarios import by_class, by_hand, tried_again

from danlu.storage.store.local_store import LocalStore


def test_states_of_saves_by_several_writers(memory: Path) -> None:
    tally = explore(by_hand(memory / "runs", range(3, 6)), memory, Tally(), most=1200, a_cut=12)
    assert not tally.wrong, tally.wrong[:3]
    assert tally.states >= 900 and tally.gone_on >= 50, tally
    assert 0 < tally.ordered < tally.states, "some states need changes of a folder out of order, and some do not"


def test_states_after_a_kill_and_a_second_try(memory: Path) -> None:
    tally = explore(tried_again(memory / "runs", every=9), memory, Tally(), most=900, a_cut=6)
    assert not tally.wrong, tally.wrong[:3]
    assert tally.scenarios >= 4 and tally.states >= 500, tally


def test_states_of_the_real_class(memory: Path) -> None:
    made = chain([by_class(memory / "small")], [by_class(memory / "large", megabytes=4)])
    tally = explore(made, memory, Tally(), most=130, a_cut=12)
    assert not tally.wrong, tally.wrong[:3]
    assert tally.scenarios == 2 and tally.states >= 100, tally


@pytest.mark.full
def test_a_commit_that_does_not_wait_for_names_is_caught(memory: Path) -> None:
    """The question itself is put to the test: without the wait before the manifest's name, it must find states."""
    real = LocalStore._sync_folder

    def unless_before_a_link(self: LocalStore, folder: str) -> None:
        calls = self._calls
        ops = calls.history.ops[-12:] if isinstance(calls, Recorder) else []
        names = {op.name for op in ops if isinstance(op, Name)}
        if not any(name.startswith("manifest.json.") for name in names):
            real(self, folder)

    with patch.object(LocalStore, "_sync_folder", unless_before_a_link):
        tally = explore(by_hand(memory / "runs", range(3, 6)), memory, Tally(), most=1200, a_cut=12)
    assert any("cannot be read" in line or "none is listed" in line for line in tally.wrong), tally


def test_a_write_that_is_not_brought_to_the_disk_is_caught(memory: Path) -> None:
    """And without the `fsync` of files it must find files that are torn."""
    (memory / "runs").mkdir()
    history = History(memory / "runs")
    store = LocalStore(memory / "runs" / "run", Recorder(history))
    write_all(store, 10, attempt_of(1), content(10, attempt_of(1)), 1)
    history.ops = [op for op in history.ops if type(op).__name__ != "Sync" or op.node in history.folders]  # type: ignore[union-attr]
    contents = {state.files.get(f"run/step-00000010/{attempt_of(1)}-000000.pack") for state in states(history, 64, 0)}
    assert len(contents) > 4, "a pack that nobody waited for may be absent, empty, zeros, torn or whole"
