"""Evaluation without ranks: which samples, in which order through a pipeline, what is refused, what is shown."""

from io import StringIO
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from danlu.parallel.forward_pipeline import StageForward, forward_turns
from danlu.report.evaluations import describe_evaluation, evaluation_series, evaluations_card, format_evaluation
from danlu.report.run_history import RunHistory
from danlu.report.run_tables import runs_table, summarize_run
from danlu.spec import EvaluationEvent, RunFolder, SpecError, SpikeEvent, StartEvent, StepEvent
from danlu.spec.check import load_run_spec
from danlu.spec.plan import Plan
from danlu.storage.data.build import build_dataset
from danlu.storage.data.held_out import HeldOutSamples
from danlu.storage.data.token_shards import TokenShards
from danlu.storage.data.tokenizer import BytesTokenizer

LOOPED, ZIGZAG = (0, 1, 2, 0, 1, 2), (0, 1, 2, 2, 1, 0)


@pytest.mark.parametrize("stage_ranks", [(0,), (0, 1, 2, 3), LOOPED, ZIGZAG])
@pytest.mark.parametrize("microbatches", [1, 2, 7])
def test_every_microbatch_passes_every_stage_in_order(stage_ranks: tuple[int, ...], microbatches: int) -> None:
    done: list[StageForward] = []
    for turn in forward_turns(stage_ranks, microbatches):
        for rank, item in turn.items():
            assert stage_ranks[item.stage] == rank
            assert item.stage == 0 or StageForward(item.stage - 1, item.microbatch) in done
        done += turn.values()
    assert sorted(done) == [
        StageForward(stage, number) for stage in range(len(stage_ranks)) for number in range(microbatches)
    ]


def test_a_pipeline_is_busy() -> None:
    assert len(forward_turns((0, 1, 2, 3), 8)) == 8 + 3
    assert len(forward_turns(LOOPED, 6)) == 2 * 6 + 2


@pytest.fixture
def shards(tmp_path: Path) -> TokenShards:
    (tmp_path / "text.txt").write_text("".join(chr(33 + number % 90) for number in range(999)))
    build_dataset([str(tmp_path / "text.txt")], tmp_path / "shards", BytesTokenizer())
    return TokenShards.open(tmp_path / "shards")


def test_samples_are_spread_over_the_data_and_repeat(shards: TokenShards) -> None:
    samples = HeldOutSamples(shards, length=10, tokens=70)
    assert (samples.available, samples.count) == (99, 7)
    samples.pad_to_multiple(4)
    everything = shards.read(0, shards.tokens)
    rows = samples.read_samples(np.arange(16))
    for row, start in zip(rows[:7], (0, 140, 280, 420, 560, 700, 840), strict=True):
        assert row.tolist() == everything[start : start + 11].tolist()
    assert (rows[7] == rows[6]).all()  # fills up
    assert (rows[8:] == rows[:8]).all()


def test_a_small_data_set_is_read_whole(shards: TokenShards) -> None:
    samples = HeldOutSamples(shards, length=10, tokens=10**6)
    rows = samples.read_samples(np.arange(samples.count))
    assert all(a[-1] == b[0] for a, b in pairwise(rows))
    assert samples.count == 99


def test_too_little_data_for_one_sample(shards: TokenShards) -> None:
    with pytest.raises(SpecError, match="one sample of length 1000 takes 1001"):
        HeldOutSamples(shards, length=1000, tokens=10**6)


RECIPE = """
name = "small"
steps = 4
model = {{ base = "tiny-llama", vocabulary = 264 }}
data = {{ shards = "shards" }}
batch = {{ sequences = 8, length = 64 }}
evaluation = {evaluation}
"""


@pytest.mark.parametrize(
    ("evaluation", "said"),
    [
        ("{ every = 5 }", "no data set and `evaluation.prompts` has no prompt, so it would be ignored"),
        ('{ data = [{ name = "a", shards = "shards" }] }', "which the run trains on"),
        ('{ data = [{ name = "a", shards = "b" }, { name = "a", shards = "c" }] }', "an earlier data set has already"),
        ('{ tokens = 63, data = [{ name = "a", shards = "b" }] }', "one sequence has 64 tokens"),
        ('{ data = [{ name = "a", shards = "s3://b/c" }] }', "is read through a cache"),
        ('{ data = [{ name = "a", shards = "ftp://b/c" }] }', "must be in a folder or at s3://"),
    ],
)
def test_contradictions_are_refused(tmp_path: Path, evaluation: str, said: str) -> None:
    (tmp_path / "recipe.toml").write_text(RECIPE.format(evaluation=evaluation))
    with pytest.raises(SpecError, match=said):
        load_run_spec(tmp_path / "recipe.toml", None, None, Plan())


def _start(step: int = 0) -> StartEvent:
    return StartEvent(
        time=1.0, world=1, chip="cpu", parameters=1, step=step, steps=9, tokens_per_step=1, flops_per_token=1.0,
        peak=1.0, peak_source="data sheet",
    )  # fmt: skip


def _step(step: int) -> StepEvent:
    return StepEvent(time=1.0 + step, step=step, loss=2.0, norm=1.0, learning_rate=1.0, tokens=1, seconds=1.0, memory=1)


def _evaluated(step: int, web: float, code: float = 3.0) -> EvaluationEvent:
    losses, tokens = {"web": web, "code <b>": code}, {"web": 300, "code <b>": 100}
    return EvaluationEvent(time=2.0, step=step, losses=losses, tokens=tokens, seconds=1.0)


def test_the_mean_is_over_tokens() -> None:
    assert _evaluated(5, web=1.0).loss == pytest.approx(1.5)
    assert format_evaluation(_evaluated(5, web=1.0)) == "held out 1.5000 at 5"
    assert describe_evaluation(_evaluated(5, web=1.0)) == (
        "1.5000 at step 5, perplexity 4.482: web 1.0000, code <b> 3.0000"
    )


def test_a_restart_drops_evaluations_of_steps_that_are_repeated() -> None:
    history = RunHistory()
    history.add([_start(), _evaluated(0, 5.0), _step(1), _evaluated(1, 4.0), _step(2), _evaluated(2, 3.0)])
    history.add([_start(step=1), _evaluated(1, 4.0)])
    assert [event.step for event in history.evaluations] == [0, 1]


def test_a_rewind_drops_evaluations_of_the_steps_it_leaves() -> None:
    history = RunHistory()
    history.add([_start(), _evaluated(0, 5.0), _step(1), _evaluated(1, 4.0), _step(2), _evaluated(2, 3.0), _step(3)])
    rewound = SpikeEvent(
        time=5.0, step=3, metric="loss", value=9.0, expected=2.0, limit=3.0, sigmas=20.0, action="rewound",
        rewound_to=1, first_sample=2, lost_steps=2, lost_samples=2, lost_seconds=1.0,
    )  # fmt: skip
    history.add([rewound])
    assert [event.step for event in history.evaluations] == [0, 1]


def test_the_page_has_every_data_set_with_its_lowest_loss() -> None:
    history = RunHistory()
    history.add([_start(), _evaluated(0, 5.0), _step(1), _evaluated(1, 1.0), _step(2), _evaluated(2, 2.0)])
    assert [(series.note, list(series.points)) for series in evaluation_series(history)] == [
        ("web", [(0, 5.0), (1, 1.0), (2, 2.0)]),
        ("code <b>", [(0, 3.0), (1, 3.0), (2, 3.0)]),
    ]
    card = evaluations_card(history)
    assert "<td>2.0000</td><td>7.389</td><td>1.0000 at step 1</td>" in card
    assert "code &lt;b&gt;" in card


def test_the_table_of_runs_has_the_column_only_where_a_run_was_evaluated(tmp_path: Path) -> None:
    folders = {name: RunFolder(tmp_path / name) for name in ("with", "without")}
    for name, run in folders.items():
        run.path.mkdir()
        events = [_start(), _step(1), *([_evaluated(1, 1.0)] if name == "with" else [])]
        run.events.write_text("".join(f"{event.model_dump_json()}\n" for event in events))

    def shown(*names: str) -> str:
        console = Console(width=200, file=StringIO())
        console.print(runs_table([summarize_run(folders[name]) for name in names], width=200))
        return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]

    assert "held out" in shown("with", "without")
    assert "1.5000" in shown("with", "without")
    assert "held out" not in shown("without")
