"""Real ranks that are killed, stopped and cut off: the run goes on, and learns bit for bit what it learns without."""

import random
from pathlib import Path

import pytest
from chaos_campaign import AGENT, COORDINATOR, DOUBLE, ChaosRun, differences, meet_all

pytestmark = pytest.mark.timeout(600)
STEPS = 150
KINDS = (
    "kill",
    "exception",
    "reset",
    DOUBLE,
    "segfault",
    "stop",
    AGENT,
    "abort",
    "preempt",
    "lock",
    COORDINATOR,
    "kill",
)


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> ChaosRun:
    run = ChaosRun(tmp_path_factory.mktemp("clean"), world=2, steps=STEPS)
    run.prepare()
    run.start()
    run.run_to_end()
    return run


def test_every_kind_of_fault_is_survived_and_nothing_is_learned_differently(tmp_path: Path, clean: ChaosRun) -> None:
    run = ChaosRun(tmp_path, world=2, steps=STEPS)
    run.prepare()
    run.start()
    meet_all(run, KINDS, random.Random(7))
    run.run_to_end()
    assert differences(run, clean) == []
    lost = {met.kind: met.steps_lost for met in run.met if met.kind not in (COORDINATOR, "preempt")}
    assert max(lost.values()) <= 1, lost
    sources = {met.kind: met.source for met in run.met}
    assert sources["kill"] == sources["stop"] == sources[DOUBLE] == "memory"
