"""Real ranks that are killed, stopped and cut off: the run goes on, and learns bit for bit what it learns without."""

import random
from pathlib import Path

import pytest
from chaos_campaign import AGENT, COORDINATOR, DOUBLE, RECIPE, ChaosRun, differences, meet_all

from danlu.resilience.injection import inject
from danlu.spec import RecoveryEvent

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


SAMPLED = (
    RECIPE
    + """
[evaluation]
every = 5
prompts = ["the "]
sample_tokens = 2
"""
)
"""What a rank does now and then beside its steps does not hide that it trains."""
QUICK = ("kill", "exception", DOUBLE, "stop", AGENT, "preempt", COORDINATOR)


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> ChaosRun:
    run = ChaosRun(tmp_path_factory.mktemp("clean"), world=2, steps=STEPS, recipe=SAMPLED)
    run.prepare()
    run.start()
    run.run_to_end()
    return run


@pytest.mark.parametrize(
    "kinds", [pytest.param(KINDS, id="all", marks=pytest.mark.full), pytest.param(QUICK, id="quick")]
)
def test_every_kind_of_fault_is_survived_and_nothing_is_learned_differently(
    kinds: tuple[str, ...], tmp_path: Path, clean: ChaosRun
) -> None:
    run = ChaosRun(tmp_path, world=2, steps=STEPS, recipe=SAMPLED)
    run.prepare()
    run.start()
    meet_all(run, kinds, random.Random(7))
    run.run_to_end()
    assert differences(run, clean) == []
    lost = {met.kind: met.steps_lost for met in run.met if met.kind not in (COORDINATOR, "preempt")}
    assert max(lost.values()) <= 1, lost
    sources = {met.kind: met.source for met in run.met}
    assert sources["kill"] == sources["stop"] == sources[DOUBLE] == "memory"


@pytest.mark.full
def test_a_replica_that_went_wrong_is_outvoted_and_leaves_no_trace(tmp_path: Path) -> None:
    recipe = RECIPE.replace("sequences = 8", "sequences = 6")
    runs = []
    for name in ("clean", "corrupted"):
        run = ChaosRun(tmp_path / name, world=3, steps=60, options=("--plan", "plan.toml"), recipe=recipe)
        run.prepare()
        (run.folder / "plan.toml").write_text("[degrees]\nreplicate = 3\n")
        run.start()
        runs.append(run)
        if name == "corrupted":
            for _ in range(5):  # a bit may be rounded away
                run.next_step(3)
                inject(run.run.path, "corrupt", 1)
                run.next_step(3)
                if found := [event for event in run.run.read_events() if isinstance(event, RecoveryEvent)]:
                    break
            assert found, run.said()
            assert "the state of rank 1 after step" in found[0].cause and "replicas, ranks 0, 2" in found[0].cause
            assert 1 in found[0].ranks and found[0].source == "memory"
        run.run_to_end()
    clean, corrupted = runs
    assert differences(corrupted, clean) == []
