"""Spikes in a real training: what each policy does, to the last bit, through stops, kills and missing checkpoints."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from made_loops import one_rank
from spiking import (
    SEQUENCES,
    Injection,
    Killed,
    SpikeRun,
    prepared,
    same_tensors,
    spike_recipe,
    trained,
    trained_with_kills,
)

from danlu.framework.step_guard import DivergedError
from danlu.spec.event import Event, StepEvent
from danlu.storage.checkpoint.checkpoint_dir import CheckpointDir
from danlu.storage.store.local_store import LocalStore

STEPS = 75
GARBAGE = Injection(47 * SEQUENCES, "garbage")
"""In step 48; the newest checkpoint 10 steps before it is that of step 30."""


@pytest.fixture(scope="module", autouse=True)
def _one_rank() -> Iterator[None]:
    with one_rank():
        yield


@pytest.fixture(scope="module")
def rewound(tmp_path_factory: pytest.TempPathFactory) -> SpikeRun:
    """A run that went back once."""
    return trained(spike_recipe(STEPS), tmp_path_factory.mktemp("rewound"), [GARBAGE])


def kept_steps(folder: Path) -> list[int]:
    return CheckpointDir(LocalStore(folder), 2).resumable_steps()


def test_after_a_rewind_a_run_is_one_without_the_samples_it_passed_over(rewound: SpikeRun) -> None:
    (spike,) = rewound.spikes
    assert (spike.step, spike.action, spike.rewound_to) == (48, "rewound", 30)
    assert (spike.lost_steps, spike.lost_samples) == (18, 18 * SEQUENCES)
    assert spike.first_sample == GARBAGE.cursor and spike.value > spike.limit > spike.expected
    taken = [event.seconds for event in rewound.events if isinstance(event, StepEvent)]
    assert sum(taken[30:48]) < spike.lost_seconds < sum(taken) + 60, "the steps, and reading the checkpoint"
    assert rewound.passed_over == [(30 * SEQUENCES, 48 * SEQUENCES)]
    reference = trained(spike_recipe(STEPS, "warn"), None, (), rewound.passed_over)
    assert rewound.curve() == reference.curve()
    assert same_tensors(rewound.state, reference.state)
    assert rewound.state.guard.scalars() == reference.state.guard.scalars(), "it has learned from the same steps"
    assert (rewound.state.step, rewound.state.cursor) == (STEPS, (STEPS + 18) * SEQUENCES)


def test_a_run_killed_right_after_a_rewind_resumes_to_the_same_bits(tmp_path: Path, rewound: SpikeRun) -> None:
    resumed = trained_with_kills(spike_recipe(STEPS), tmp_path, [GARBAGE], lambda spike: True)
    assert [spike.step for spike in resumed.spikes] == [48, 48], "what was killed is done again"
    assert resumed.kills == 1
    assert same_tensors(resumed.state, rewound.state) and resumed.curve() == rewound.curve()
    assert resumed.state.scalars() == rewound.state.scalars()


def test_a_run_stopped_after_a_rewind_resumes_to_the_same_bits(tmp_path: Path, rewound: SpikeRun) -> None:
    """Stopped at step 34, which was reached once before on the branch that was left."""
    recipe = spike_recipe(STEPS)
    stopped = trained(recipe, tmp_path, [GARBAGE], stop=lambda run: bool(run.spikes) and run.state.step == 33)
    assert stopped.state.step == 34 and kept_steps(tmp_path) == [30, 34]
    resumed = trained(recipe, tmp_path, [GARBAGE])
    assert resumed.curve() == rewound.curve()[34:]
    assert same_tensors(resumed.state, rewound.state) and resumed.state.scalars() == rewound.state.scalars()


def test_a_stop_in_the_step_of_a_rewind_leaves_what_can_be_resumed(tmp_path: Path, rewound: SpikeRun) -> None:
    recipe = spike_recipe(STEPS)
    stopped = trained(recipe, tmp_path, [GARBAGE], stop=lambda run: run.state.step == 47)
    assert stopped.state.step == 30 and kept_steps(tmp_path)[-1] == 30
    assert same_tensors(trained(recipe, tmp_path, [GARBAGE]).state, rewound.state)


def test_checkpoints_of_the_branch_that_was_left_are_gone_and_a_kill_among_them_is_no_harm(
    tmp_path: Path, rewound: SpikeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[list[int]] = []
    recipe = spike_recipe(STEPS)

    def killed(self: CheckpointDir, step: int) -> None:
        seen.append(self.resumable_steps())
        raise Killed

    with monkeypatch.context() as patch, prepared(recipe, tmp_path, [GARBAGE]) as (_, train):
        patch.setattr(CheckpointDir, "remove_after", killed)
        with pytest.raises(Killed):
            train()
    assert seen == [[30, 40]] and kept_steps(tmp_path) == [30, 40]
    left: list[list[int]] = []
    resumed = trained(recipe, tmp_path, [GARBAGE], after=lambda event: left.append(kept_steps(tmp_path)))
    assert [kept for event, kept in zip(resumed.events, left, strict=True) if event in resumed.spikes] == [[30]]
    assert same_tensors(resumed.state, rewound.state)


def test_statistics_are_those_of_the_step_that_is_resumed_from(tmp_path: Path) -> None:
    """A spike soon after a resume is found: the window was not learned anew."""
    recipe = spike_recipe(STEPS, "skip", spikes={"window": 64})
    late = [Injection(55 * SEQUENCES, "gradient", 1e3)]
    through = trained(recipe, tmp_path / "through", late)
    trained(recipe, tmp_path / "cut", late, stop=lambda run: run.state.step == 49)
    resumed = trained(recipe, tmp_path / "cut", late)
    assert [spike.step for spike in resumed.spikes] == [56]
    assert same_tensors(resumed.state, through.state) and resumed.state.scalars() == through.state.scalars()


def test_skipping_is_what_happens_to_steps_that_are_not_finite(tmp_path: Path) -> None:
    places = [45 * SEQUENCES, 52 * SEQUENCES]
    skipped = trained(spike_recipe(60, "skip"), None, [Injection(at, "gradient", 1e3) for at in places])
    assert [(spike.step, spike.metric, spike.action) for spike in skipped.spikes] == [
        (46, "norm", "skipped"),
        (53, "norm", "skipped"),
    ]
    assert all((spike.lost_steps, spike.lost_samples) == (1, SEQUENCES) for spike in skipped.spikes)
    assert [step.reason for step in skipped.steps.values() if not step.committed] == ["spike", "spike"]
    broken = trained(spike_recipe(60, "off"), None, [Injection(at, "not finite") for at in places])
    assert [step.reason for step in broken.steps.values() if not step.committed] == ["not finite", "not finite"]
    assert same_tensors(skipped.state, broken.state)


def test_a_warning_changes_no_bit() -> None:
    spike = [Injection(45 * SEQUENCES, "loss", 3.0)]
    warned = trained(spike_recipe(60, "warn"), None, spike)
    assert [(event.step, event.action, event.lost_steps) for event in warned.spikes] == [(46, "warned", 0)]
    assert warned.steps[46].committed and warned.steps[46].reason == "spike"
    silent = trained(spike_recipe(60, "off"), None, spike)
    assert warned.curve() == silent.curve() and same_tensors(warned.state, silent.state)


def test_damaged_weights_are_healed_by_a_rewind(tmp_path: Path) -> None:
    run = trained(spike_recipe(60), tmp_path, [Injection(44 * SEQUENCES, "weights", 4.0)])
    assert [(spike.step, spike.rewound_to) for spike in run.spikes] == [(45, 30)]
    reference = trained(spike_recipe(60, "off"), None, (), run.passed_over)
    assert run.curve() == reference.curve()


def test_without_a_checkpoint_the_batch_is_skipped(tmp_path: Path) -> None:
    recipe = spike_recipe(50).model_copy(
        update={"checkpoint": spike_recipe(50).checkpoint.model_copy(update={"every": 45})}
    )
    run = trained(recipe, tmp_path, [Injection(38 * SEQUENCES, "loss", 5.0)])
    assert [(spike.action, spike.lost_steps) for spike in run.spikes] == [("skipped", 1)]
    assert "no checkpoint" in run.spikes[0].note and not run.steps[39].committed


def test_rewinds_that_lead_nowhere_end_the_run(tmp_path: Path) -> None:
    """Every batch from the spike on is one: the run goes back, is stopped there again, and gives up."""
    recipe = spike_recipe(STEPS, spikes={"max_rewinds": 2})
    bad = [Injection(number * SEQUENCES, "loss", 5.0) for number in range(57, 120)]
    with (
        prepared(recipe, tmp_path, bad) as (run, train),
        pytest.raises(DivergedError, match="after 2 rewinds in a row"),
    ):
        train()
    assert [(spike.step, spike.rewound_to) for spike in run.spikes] == [(58, 40), (41, 40)]
    assert run.passed_over == [(40 * SEQUENCES, 59 * SEQUENCES)]


def test_a_corrupt_checkpoint_is_passed_by(tmp_path: Path) -> None:
    damaged: list[Path] = []

    def damage(event: Event) -> None:
        if event.kind == "step" and event.step == 47 and not damaged:
            (pack,) = (tmp_path / "step-00000030").glob("*.pack")
            pack.write_bytes(b"\0" * pack.stat().st_size)
            damaged.append(pack)

    recipe = spike_recipe(60)
    recipe = recipe.model_copy(update={"checkpoint": recipe.checkpoint.model_copy(update={"keep": 4})})
    run = trained(recipe, tmp_path, [GARBAGE], after=damage)
    assert damaged and [(spike.step, spike.rewound_to) for spike in run.spikes] == [(48, 20)]
    assert any("quarantined" in warning for warning in run.warnings)
    assert run.curve() == trained(spike_recipe(60, "off"), None, (), run.passed_over).curve()
