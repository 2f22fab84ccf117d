"""A crash between any two calls of a build, an append or a run that takes one up: no wrong token, no promise lost.

Every call of the real code is recorded by a file system of its own, whatever library made it. The model of a crash is
that of `crash_states.py`; `benchmarks/ckpt_crashes.py` looks at many more states.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import pytest
from data_crashes import DataScenario, DataTally, data_scenarios, explore_data
from fuse_mount import NoFuseError


def recorded(folder: Path, kills: range) -> Iterator[DataScenario]:
    try:
        yield from data_scenarios(folder, kills)
    except NoFuseError as error:
        pytest.skip(str(error))


def test_states_of_builds_and_promises(memory: Path) -> None:
    tally = explore_data(recorded(memory / "runs", range(20, 21)), memory, DataTally(), a_cut=1, again_every=12)
    assert not tally.wrong, tally.wrong[:3]
    assert tally.scenarios == 5 and tally.states >= 400 and tally.built_again >= 30, tally
    assert 0 < tally.ordered < tally.states, "some states need changes of a folder out of order, and some do not"


def test_builds_that_do_not_wait_for_the_disk_are_caught(memory: Path) -> None:
    """The question itself is put to the test: without any `fsync` it must find torn data sets and lost promises."""
    with patch.object(os, "fsync", lambda descriptor: None):
        made = [*recorded(memory / "runs", range(0))]
    tally = explore_data(made[-2:-1], memory, DataTally(), a_cut=1, again_every=1000)
    for sign in ("but the data set cannot be read", "promises had been made, but there are", "no data set"):
        assert any(sign in line for line in tally.wrong), (sign, tally.wrong[:3])
