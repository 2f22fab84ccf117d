"""Times of a pipeline: known bubbles, by hand where there is no formula, and torch's own orders."""

import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.distributed.pipelining import ScheduleInterleavedZeroBubble as ZeroBubble
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle

from danlu.cost.pipeline_schedules import pipeline_actions
from danlu.cost.pipeline_simulator import (
    ACTION_KINDS,
    Action,
    Durations,
    ScheduleError,
    TimedAction,
    parse_action,
    simulate,
)
from danlu.spec.plan import PipelineSchedule
from danlu.torch_compat.pipelining import action_kind


def equal(stages: int, forward: float = 1.0, backward: float = 2.0) -> Durations:
    """All stages alike; halves of the backward take half of it."""
    times = {"F": forward, "B": backward, "I": backward / 2, "W": backward / 2}
    return {(kind, stage): times[kind] for kind in ACTION_KINDS for stage in range(stages)}


# ---------------------------------------------------------------------------------------- known results


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("places", "microbatches"), [(1, 3), (2, 2), (4, 8), (8, 32), (4, 2)])
@pytest.mark.parametrize("backward", [1.0, 2.0, 3.0])
def test_the_bubble_of_equal_stages(
    schedule: PipelineSchedule, places: int, microbatches: int, backward: float
) -> None:
    order = pipeline_actions(schedule, pp_ranks=places, microbatches=microbatches)
    timeline = simulate(order, equal(places, 1.0, backward))
    assert timeline.total == pytest.approx((microbatches + places - 1) * (1 + backward))
    assert timeline.bubble_fraction == pytest.approx((places - 1) / (microbatches + places - 1))
    assert timeline.busy == pytest.approx([microbatches * (1 + backward)] * places)


@pytest.mark.parametrize("turns", [2, 3, 4])
@pytest.mark.parametrize(("places", "microbatches"), [(2, 4), (4, 8), (8, 16)])
def test_interleaving_divides_the_idle_time(places: int, microbatches: int, turns: int) -> None:
    """Stages are `turns` times shorter, and so is the time a rank waits."""
    whole = simulate(pipeline_actions("1f1b", pp_ranks=places, microbatches=microbatches), equal(places))
    order = pipeline_actions("interleaved", pp_ranks=places, microbatches=microbatches, stages_per_rank=turns)
    pieces = simulate(order, equal(places * turns, 1 / turns, 2 / turns))
    assert sum(pieces.busy) == pytest.approx(sum(whole.busy))
    idle = [places * some.total - sum(some.busy) for some in (whole, pieces)]
    assert idle[1] == pytest.approx(idle[0] / turns)
    assert pieces.bubble_fraction == pytest.approx((places - 1) / (turns * microbatches + places - 1))


def test_two_places_by_hand() -> None:
    order = [["F0.0", "F0.1", "B0.0", "B0.1"], ["F1.0", "B1.0", "F1.1", "B1.1"]]
    timeline = simulate(order, {("F", 0): 1, ("B", 0): 2, ("F", 1): 3, ("B", 1): 4})
    assert [(str(slot.action), slot.start, slot.end) for slot in timeline.actions_by_rank[0]] == [
        ("F0.0", 0, 1),
        ("F0.1", 1, 2),
        ("B0.0", 8, 10),
        ("B0.1", 15, 17),
    ]
    assert [(slot.start, slot.end) for slot in timeline.actions_by_rank[1]] == [(1, 4), (4, 8), (8, 11), (11, 15)]
    assert timeline.total == 17
    assert timeline.bubble_fraction == pytest.approx(1 - (6 + 14) / 34)


def test_halves_of_the_backward() -> None:
    """The half for weights fills the time in which the first rank waits; no rank waits for it."""
    order = [["F0.0", "F0.1", "I0.0", "W0.0", "I0.1", "W0.1"], ["F1.0", "I1.0", "F1.1", "I1.1", "W1.0", "W1.1"]]
    timeline = simulate(order, equal(2))
    first, last = ([(str(slot.action), slot.start) for slot in row] for row in timeline.actions_by_rank)
    assert first == [("F0.0", 0), ("F0.1", 1), ("I0.0", 3), ("W0.0", 4), ("I0.1", 5), ("W0.1", 6)]
    assert last == [("F1.0", 1), ("I1.0", 2), ("F1.1", 3), ("I1.1", 4), ("W1.0", 5), ("W1.1", 6)]
    assert timeline.total == 7


def test_whole_and_halved_backwards_may_be_mixed() -> None:
    timeline = simulate([["F0.0", "B0.0"], ["F1.0", "I1.0", "W1.0"]], equal(2))
    assert timeline.actions_by_rank[0][-1] == TimedAction(Action("B", 0, 0), 3.0, 5.0)


def test_transfers_delay_but_hold_nobody() -> None:
    order = pipeline_actions("1f1b", pp_ranks=2, microbatches=1)
    there_and_back = simulate(order, equal(2), {(0, 1): 10.0, (1, 0): 5.0})
    assert [(slot.start, slot.end) for slot in there_and_back.actions_by_rank[1]] == [(11, 12), (12, 14)]
    assert there_and_back.actions_by_rank[0][1] == TimedAction(Action("B", 0, 0), 19.0, 21.0)
    # In the V of two stages per rank, the turn lies on one rank and takes nothing.
    turn = simulate(
        [["F0.0", "F3.0", "B3.0", "B0.0"], ["F1.0", "F2.0", "B2.0", "B1.0"]], equal(4), {(0, 1): 1, (1, 0): 1}
    )
    assert turn.actions_by_rank[1][1].start == turn.actions_by_rank[1][0].end
    assert turn.total == 4 * 3 + 4


def test_no_pipeline_takes_no_time() -> None:
    assert simulate([], {}).total == 0
    assert simulate([[]], {}).bubble_fraction == 0


def test_a_large_pipeline_is_quick() -> None:
    order = pipeline_actions("1f1b", pp_ranks=64, microbatches=512)
    before = time.process_time()
    timeline = simulate(order, equal(64))
    assert time.process_time() - before < 10  # half a second at rest; a search through all actions takes minutes
    assert timeline.bubble_fraction == pytest.approx(63 / 575)


# ---------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize("text", ["", "F", "F0", "F0.", "F.3", "X0.3", "0F3", "F0.3.1", "F-1.3", "F 0.3", "FORWARD0.3"])
def test_an_unknown_action_is_named(text: str) -> None:
    with pytest.raises(ScheduleError, match=r'such as "F0\.3", but is "' + text):
        parse_action(text)
    with pytest.raises(ScheduleError):
        simulate([[text]], equal(1))


@pytest.mark.parametrize(
    ("order", "words"),
    [
        ([["F0.0", "F1.0"], ["F1.0"]], "stage 1 lies on 0 and 1"),
        ([["F0.0", "F0.0"]], "F0.0 occurs twice on rank 0"),
        ([["F0.0"], ["F2.0"]], "1 of 3 has no action"),
        ([["B0.0", "F0.0"]], "rank 0 waits at B0.0 for F0.0"),
        ([["F0.0", "W0.0"]], "rank 0 waits at W0.0 for I0.0, which no rank runs"),
        ([["F0.0", "B0.0"], ["F1.0"]], "rank 0 waits at B0.0 for B1.0, which no rank runs"),
        (
            [["F0.0", "B0.0", "F0.1", "B0.1"], ["F1.0", "F1.1", "B1.0", "B1.1"]],
            "at B0.0 for B1.0; rank 1 waits at F1.1",
        ),
    ],
)
def test_what_cannot_run_says_why(order: list[list[str]], words: str) -> None:
    with pytest.raises(ScheduleError, match=words):
        simulate(order, equal(3))


def test_a_standstill_of_many_places_is_told_shortly() -> None:
    order = [["B0.0", "F0.0"], *([f"F{place}.0", f"B{place}.0"] for place in range(1, 9))]
    with pytest.raises(ScheduleError, match=r"rank 3 waits at F3\.0 for F2\.0; 5 more$"):
        simulate(order, equal(9))


def test_durations_must_be_there_and_real() -> None:
    with pytest.raises(ScheduleError, match="B of stage 0 has none"):
        simulate([["F0.0", "B0.0"]], {("F", 0): 1.0})
    for wrong in (-1.0, float("nan")):
        with pytest.raises(ScheduleError, match="F of stage 0 takes"):
            simulate([["F0.0"]], {("F", 0): wrong})


def test_orders_that_no_formula_gives() -> None:
    with pytest.raises(ScheduleError, match="zbv needs 2 stages per rank, but has 3"):
        pipeline_actions("zbv", pp_ranks=2, microbatches=4, stages_per_rank=3)
    with pytest.raises(ScheduleError, match="1f1b needs 1 stage per rank, but has 2"):
        pipeline_actions("1f1b", pp_ranks=2, microbatches=4, stages_per_rank=2)
    with pytest.raises(ScheduleError, match="multiple of 2"):
        pipeline_actions("interleaved", pp_ranks=2, microbatches=5, stages_per_rank=2)


# --------------------------------------------------------------------------------------- torch's orders


class ListeningStage:
    """A stage that computes nothing and writes down what a schedule asks of it."""

    def __init__(self, index: int, stages: int, heard: list[str]) -> None:
        self.stage_index, self.num_stages, self.heard = index, stages, heard
        self.is_first, self.is_last, self.has_backward = index == 0, index == stages - 1, True

    def forward_one_chunk(self, microbatch: int, *_: object, **__: object) -> None:
        self.heard.append(f"F{self.stage_index}.{microbatch}")

    def backward_one_chunk(self, microbatch: int, **_: object) -> None:
        self.heard.append(f"B{self.stage_index}.{microbatch}")

    def __getattr__(self, name: str) -> Any:
        assert name.startswith("get_") or name in ("perform_reduce_grad", "scale_grads"), name
        return lambda *_, **__: []


def heard(schedule: type[PipelineScheduleSingle], places: int, microbatches: int, monkeypatch: Any) -> list[list[str]]:
    """What torch runs on every pp rank.

    Its `pipeline_order` is not asked: in 2.13 that of 1F1B begins the last place with microbatch 1.
    """
    monkeypatch.setattr(schedule, "_initialize_stage", lambda *_: None)
    monkeypatch.setattr(schedule, "_maybe_compute_loss", lambda *_: None)
    monkeypatch.setattr(schedule, "_maybe_get_loss", lambda *_: None)
    monkeypatch.setattr(schedule, "_update_losses", lambda *_: None)
    rows: list[list[str]] = []
    for place in range(places):
        rows.append([])
        stage: Any = ListeningStage(place, places, rows[-1])
        schedule(stage, microbatches)._step_microbatches([()] * microbatches, [{}] * microbatches)
    return rows


def written(schedule: type[PipelineScheduleMulti], places: int, microbatches: int, turns: int) -> list[list[str]]:
    """The order that torch computes for all pp ranks."""
    alike = {"group_size": places, "group_rank": 0, "num_stages": places * turns, "submod": torch.nn.Identity()}
    stages: Any = [SimpleNamespace(**alike, is_last=False, stage_index=turn * places) for turn in range(turns)]
    order = schedule(stages, microbatches, loss_fn=lambda *_: None).pipeline_order
    return [
        [f"{action_kind(action)}{action.stage_index}.{action.microbatch_index}" for action in row if action]
        for _, row in sorted(order.items())
    ]


@pytest.mark.parametrize(("places", "microbatches"), [(1, 2), (2, 2), (4, 8), (3, 7)])
@pytest.mark.parametrize(("name", "schedule"), [("gpipe", ScheduleGPipe), ("1f1b", Schedule1F1B)])
def test_orders_are_those_torch_runs(
    name: PipelineSchedule,
    schedule: type[PipelineScheduleSingle],
    places: int,
    microbatches: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ours = pipeline_actions(name, pp_ranks=places, microbatches=microbatches)
    assert [list(row) for row in ours] == heard(schedule, places, microbatches, monkeypatch)


@pytest.mark.parametrize(
    ("places", "microbatches", "turns"), [(2, 4, 2), (4, 8, 2), (4, 8, 3), (4, 10, 2), (4, 3, 2), (2, 2, 4), (3, 6, 1)]
)
def test_the_interleaved_order_is_torchs(places: int, microbatches: int, turns: int) -> None:
    ours = pipeline_actions("interleaved", pp_ranks=places, microbatches=microbatches, stages_per_rank=turns)
    assert [list(row) for row in ours] == written(ScheduleInterleaved1F1B, places, microbatches, turns)


def test_torchs_zero_bubble_order_can_be_timed() -> None:
    order = written(ZeroBubble, 4, 8, 2)
    halves = simulate(order, equal(8, 0.5, 1.0))
    whole = simulate(pipeline_actions("interleaved", pp_ranks=4, microbatches=8, stages_per_rank=2), equal(8, 0.5, 1.0))
    assert sum(halves.busy) == pytest.approx(sum(whole.busy))
    assert halves.bubble_fraction < whole.bubble_fraction
