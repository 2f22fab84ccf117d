"""A crash while real ranks save together: their calls, as the kernel saw them, in the order in which it did.

`benchmarks/ckpt_crashes.py` looks at many more states, of up to four ranks.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
from crash_campaign import Tally, explore
from fuse_mount import NoFuseError
from history import Name
from rank_crashes import by_ranks
from scenarios import Scenario


def recorded(folder: Path) -> Iterator[Scenario]:
    try:
        yield from by_ranks(folder, world=2, parities=(0, 1))
    except NoFuseError as error:
        pytest.skip(str(error))


def test_states_of_saves_by_real_ranks(memory: Path) -> None:
    made = list(recorded(memory / "runs"))
    for scenario in made:
        names = [op.name for op in scenario.history.ops if isinstance(op, Name)]
        writers = {name.split("-")[1][:6] for name in names if ".pack" in name}
        assert {"000000", "000001"} <= writers, "both ranks wrote"
    tally = explore(made, memory, Tally(), most=10_000, a_cut=2, spread=True)
    assert not tally.wrong, tally.wrong[:3]
    assert tally.scenarios == 2 and tally.states >= 250 and tally.gone_on >= 10, tally
