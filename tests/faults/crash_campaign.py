"""Make the states of many scenarios and hold each against what was saved; shared by the tests and the campaign."""

import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from crash_states import State, known, sampled, states
from made_checkpoints import KEEP, Wrong, attempt_of, check, content, write_all
from scenarios import Scenario

from danlu.storage.checkpoint.checkpoint_dir import CheckpointDir
from danlu.storage.store.local_store import LocalStore

GO_ON_EVERY = 16
"""In one of so many states the run also goes on: it saves again and goes on saving."""


@dataclass
class Tally:
    """What was looked at."""

    scenarios: int = 0
    calls: int = 0
    states: int = 0
    ordered: int = 0
    """Those a file system can leave that keeps a folder's changes in order."""
    gone_on: int = 0
    wrong: list[str] = field(default_factory=list)
    _seen: set[bytes] = field(default_factory=set, repr=False)

    def new(self, state: State, committed: list[int]) -> bool:
        """Whether this state was not seen yet, with the same promise to keep."""
        key = state.digest() + repr(committed[-1:]).encode()
        if key in self._seen:
            return False
        self._seen.add(key)
        self.states += 1
        self.ordered += state.ordered
        return True


def explore(
    scenarios: Iterable[Scenario],
    folder: Path,
    tally: Tally,
    most: int,
    a_cut: int,
    seed: int = 0,
    on_state: Callable[[], None] = lambda: None,
    *,
    spread: bool = False,
) -> Tally:
    """Look at up to `most` states that differ, some `a_cut` for every place a crash may be at.

    With `spread` no more than `a_cut` of each, so that all of a scenario is reached before there are too many.
    """
    for scenario in scenarios:
        tally.scenarios += 1
        tally.calls += len(scenario.history.ops)
        of_cuts = sampled if spread else states
        for state in of_cuts(scenario.history, 1 if scenario.large else a_cut, seed):
            if tally.states >= most:
                return tally
            committed = known(scenario.history, state.cut)
            if not tally.new(state, committed):
                continue
            try:
                _look(scenario, state, committed, folder, tally)
            except Wrong as wrong:
                tally.wrong.append(f"{scenario.name}, after {_last_call(scenario, state)}: {wrong}")
            on_state()
    return tally


def _look(scenario: Scenario, state: State, committed: list[int], folder: Path, tally: Tally) -> None:
    place = folder / "state"
    place.mkdir(parents=True)
    try:
        state.make(place)
        check(LocalStore(place / "run"), scenario.expected, committed)
        if not scenario.large and tally.states % GO_ON_EVERY == 0:
            _go_on(scenario, place / "run")
            tally.gone_on += 1
    finally:
        shutil.rmtree(place)


def _go_on(scenario: Scenario, folder: Path) -> None:
    """A new process saves every step that is not there, and one more; leftovers must not be in its way, nor stay."""
    saved = dict(scenario.saved)
    store = LocalStore(folder)
    shelf = CheckpointDir(store, KEEP)
    newest = max(shelf.resumable_steps(), default=0)
    steps = [step for step in (10, 20, 30, 40, 50, 60) if step > newest][:3]
    for number, step in enumerate(steps):
        attempt = attempt_of(-step)
        saved[step, attempt] = content(step, attempt)
        shelf.refuse_or_quarantine(step)
        if not number:
            shelf.remove_leftovers(step, attempt)
        shelf.purge_stale(write_all(store, step, attempt, saved[step, attempt], 2).step)
        check(store, lambda step, attempt: saved[step, attempt], [step])
    left = [name.name for name in folder.rglob("*") if name.is_file()]
    aside = len(shelf.quarantined_steps())
    if len(steps) == 3 and len(left) > (KEEP + 2 * aside) * 8:
        raise Wrong(f"leftovers stay for ever: {sorted(left)}")


def _last_call(scenario: Scenario, state: State) -> str:
    return f"call {state.cut} ({scenario.history.ops[state.cut - 1]!r:.120})" if state.cut else "nothing"
