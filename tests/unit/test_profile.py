"""A profile without ranks: which part gets which time, what the trace contains, how the table is ordered."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from trace_rules import check_trace
from typer.testing import CliRunner

from danlu.cli.app import app
from danlu.cost import StepPrediction
from danlu.cost.memory import MemoryEstimate
from danlu.profiler.attribution import StepAttribution, attribute_step
from danlu.profiler.collective_calls import CollectiveMismatchError, match_calls
from danlu.profiler.comparison import compare_parts, compare_total, largest_gap, profiler_slowdown
from danlu.profiler.profiler_events import BACKWARD_NODE, RankCollective, step_trees
from danlu.profiler.timeline import merge_timelines, rank_timeline
from danlu.report.profile_tables import profile_json
from danlu.spec.profile import ProfiledCollectives, ProfiledStep, RankProfile

OTHER_THREAD = 77


class Recording:
    """Writes events as torch's profiler does; every event takes a microsecond of its own before what is inside."""

    def __init__(self) -> None:
        self.records: list[dict[str, Any]] = []
        self.now = 1000.0

    def event(self, name: str, *inside: Any, own: float = 1.0, annotation: bool = False, **args: Any) -> Any:
        def write() -> None:
            category = "user_annotation" if annotation else "cpu_op"
            record = {"ph": "X", "cat": category, "name": name, "pid": 1, "tid": 5, "args": args, "ts": self.now}
            self.records.append(record)
            self.now += own
            for each in inside:
                each()
            record["dur"] = self.now - record["ts"]

        return write


def _makes(sequence: int | None) -> dict[str, int]:
    """Arguments of an operator that makes an autograd node, and of that node."""
    return {} if sequence is None else {"Sequence number": sequence}


def _node(recording: Recording, name: str, sequence: int | None, *inside: Any, own: float = 1.0) -> Any:
    return recording.event(f"{BACKWARD_NODE}{name}", *inside, own=own, **_makes(sequence))


def _step(recording: Recording) -> Any:
    """A step of one block under FSDP, whose MLP is recomputed; own times are powers of two, so that sums tell them."""
    e = recording.event

    def module(name: str, *inside: Any, own: float = 0.0) -> Any:
        return e(f"danlu.module:{name}", *inside, own=own)

    gathered = {"Input Dims": [[64], [32]]}
    return e(
        "danlu.step:7",
        e("danlu.stage:batch", e("aten::stack", own=4.0), own=0.0),
        e(
            "danlu.stage:passes",
            module(
                "blocks.0",
                e(
                    "FSDP::pre_forward",
                    e("aten::copy_", own=8.0),
                    e("c10d::_allgather_base_", own=16.0, **gathered),
                    e("danlu.wait", own=32.0),
                    annotation=True,
                    own=0.0,
                ),
                module("blocks.0.attention.q", e("aten::linear", e("aten::mm", own=64.0), own=0.0, **_makes(3))),
                e("aten::scaled_dot_product_attention", e("aten::bmm", own=128.0), own=0.0, **_makes(4)),
                module("blocks.0.mlp", e("aten::silu", own=256.0, **_makes(5)), own=512.0),
            ),
            module("loss", e("aten::mm", own=1024.0, **_makes(6))),
            _node(recording, "LossBackward", 6, e("aten::mm", own=1024.0), own=0.0),
            _node(
                recording,
                "SiluBackward0",
                5,
                e("danlu.recompute", module("blocks.0.mlp", e("aten::mm", own=2048.0)), own=0.0),
                e("aten::mul", own=4096.0),
                own=0.0,
            ),
            _node(recording, "BmmBackward0", 4, e("aten::bmm", own=8192.0), own=0.0),
            _node(recording, "MmBackward0", 3, e("aten::mm", own=16384.0), own=0.0),
            _node(recording, "torch::autograd::AccumulateGrad", None, e("aten::add_", own=32768.0), own=0.0),
            own=65536.0,
        ),
        e(
            "danlu.stage:metrics",
            e("c10d::allreduce_", own=0.25, **{"Input Dims": [[[5]]]}),
            e("danlu.wait", own=131072.0),
            own=0.0,
        ),
        e("aten::_foreach_add_", own=262144.0),
        e("c10d::alltoall_base_", own=524288.0, **{"Input Dims": [[4], [4]]}),
        e("danlu.wait", own=1.0),
        e("aten::mm", own=1048576.0),
        own=0.5,
    )  # fmt: skip


CALLS = [
    RankCollective("all_gather", "float32", 128, "shard", 2),
    RankCollective("all_reduce", "float32", 20, "world", 2),
    RankCollective("all_to_all", "float32", 16, "shard", 2),
]


def _attributed(recorded: list[RankCollective] = CALLS) -> tuple[Any, StepAttribution]:
    recording = Recording()
    _step(recording)()
    elsewhere = {"ph": "X", "cat": "user_annotation", "name": "gloo:all_gather", "pid": 1, "tid": OTHER_THREAD}
    (tree,) = step_trees([*recording.records, elsewhere | {"ts": 1000.0, "dur": 9e9, "args": {}}])
    return tree, attribute_step(tree, match_calls(tree, recorded), pipeline=False)


def test_every_microsecond_belongs_to_its_part() -> None:
    tree, found = _attributed()
    assert dict(found.parts) == {
        "other": 0.5 + 4,
        "gather": 8 + 16 + 32,
        "linear": 64 + 16384,
        "attention": 128 + 8192,
        "elementwise": 256 + 4096,
        "head": 2 * 1024,
        "recompute": 2048,
        "waiting": 512 + 65536,
        "accumulate": 32768,
        "stragglers": 131072 + 0.25,
        "optimizer": 262144,
        "exchange": 524288 + 1,
        "orthogonalization": 1048576,
    }
    assert sum(found.parts.values()) == tree.duration


def test_a_backward_operator_has_the_module_that_made_its_node() -> None:
    _, found = _attributed()
    products = {
        (place.phase, place.module) for event, place in found.places.items() if event.name in ("aten::mm", "aten::bmm")
    }
    assert ("backward", "blocks.0.attention.q") in products
    assert ("backward", "blocks.0") in products
    assert ("backward", "loss") in products
    assert ("recompute", "blocks.0.mlp") in products


def test_collectives_have_their_bytes_and_what_was_waited_for() -> None:
    _, found = _attributed()
    gather, reduce, _ = found.collectives
    assert (gather.call.axes, gather.call.payload, gather.exposed) == ("shard", 32 * 4, 16 + 32)
    assert (reduce.call.axes, reduce.call.payload, reduce.exposed) == ("world", 5 * 4, 131072 + 0.25)
    assert gather.end - gather.start == 16 + 32


def test_a_functional_collective_is_waited_for_by_an_operator() -> None:
    """As DTensors do: what wraps the result does not wait, and a second wait has nothing to wait for."""
    recording = Recording()
    e = recording.event
    recording.event(
        "danlu.step:0",
        e(
            "danlu.stage:passes",
            e(
                "danlu.module:blocks.0.attention.q",
                e("_c10d_functional::all_gather_into_tensor", own=2.0, **{"Input Dims": [[3], [], []]}),
                e("_c10d_functional::_wrap_tensor_autograd", own=4.0),
                e(
                    "aten::mm",
                    e("PythonSubclass", e("_c10d_functional::wait_tensor", own=8.0), e("aten::mm", own=16.0)),
                ),
                e("_c10d_functional::wait_tensor", own=32.0),
                own=0.0,
            ),
            own=0.0,
        ),
        own=0.0,
    )()
    (tree,) = step_trees(recording.records)
    found = attribute_step(
        tree, match_calls(tree, [RankCollective("all_gather", "int64", 24, "tp", 2)]), pipeline=False
    )
    assert {part: time for part, time in found.parts.items() if time} == {
        "tensor": 2 + 8,
        "linear": 16,
        "waiting": 4 + 2 + 32,
    }


def test_bytes_are_those_of_the_profiled_step() -> None:
    """What experts exchange differs from step to step."""
    _, found = _attributed([RankCollective("all_gather", "bfloat16", 999, "shard", 2), *CALLS[1:]])
    assert found.collectives[0].call.payload == 32 * 2


def test_other_collectives_than_recorded_are_an_error() -> None:
    with pytest.raises(CollectiveMismatchError, match="called 3 collectives, the step before it 1"):
        _attributed(CALLS[:1])


def _profile(rank: int, parts: dict[str, float], seconds: float | None = None) -> RankProfile:
    tree, found = _attributed()
    events, dropped = rank_timeline(rank, [tree], [found])
    return RankProfile(
        rank=rank,
        place={"shard": rank},
        host="here",
        pid=9,
        started_ns=10**18 + 1500 * rank,
        steps=(ProfiledStep(step=7, seconds=seconds or sum(parts.values()), parts=parts),),
        unprofiled_seconds=(8.0,),
        collectives=(
            ProfiledCollectives(
                operation="send", dtype="float32", payload=4, axes="pp", ranks=2, count=1, seconds=0.5
            ),
        ),
        dropped_events=dropped,
        timeline=tuple(events),
    )  # fmt: skip


def test_the_trace_has_a_process_per_rank_with_names_phases_and_collectives() -> None:
    profiles = [_profile(rank, {"linear": 1.0}) for rank in (0, 3)]
    trace = json.loads(json.dumps(merge_timelines(profiles, {"run": "small"})))
    assert check_trace(trace) == [0, 3]
    events = [event for event in trace["traceEvents"] if event["pid"] == 3]
    assert {"rank 3: shard 3"} == {event["args"]["name"] for event in events if event["name"] == "process_name"}
    phases = [event["name"] for event in events if event["ph"] == "X" and event["tid"] == 0]
    assert sorted(phases) == sorted(
        ["step 7", "batch", "passes", "forward", "backward", "recompute", "metrics", "optimizer"]
    )
    (gather,) = (event for event in events if event["name"] == "all_gather shard")
    assert gather["args"]["bytes"] == 128
    assert gather["args"]["axes"] == "shard"
    assert "operators left out" in trace["otherData"]["left out"]
    steps = [event["ts"] for event in trace["traceEvents"] if event["name"] == "step 7"]
    assert steps == [0.0, 4.5]  # rank 3 began 4.5 us later


def test_collectives_that_overlap_have_tracks_of_their_own() -> None:
    tree, found = _attributed()
    gather, reduce, _ = found.collectives
    found.collectives = [replace(gather, start=10.0, end=30.0), replace(reduce, start=20.0, end=40.0)]
    found.collectives.append(replace(reduce, start=30.0, end=35.0))
    events, _ = rank_timeline(0, [tree], [found])
    tracks = [event["tid"] for event in events if event["cat"] == "collective"]
    assert tracks == [2, 3, 2]


def _prediction(parts: dict[str, float]) -> StepPrediction:
    memory = MemoryEstimate.__new__(MemoryEstimate)
    return StepPrediction(seconds=sum(parts.values()), parts=parts, memory=memory)


def test_the_worst_predicted_part_is_first_and_transfers_are_compared_with_the_bubble() -> None:
    profiles = [
        _profile(0, {"linear": 4.0, "transfer": 5.0, "other": 1.0}),
        _profile(1, {"linear": 6.0, "bubble": 3.0, "other": 1.0}),
    ]
    rows = compare_parts(profiles, _prediction({"linear": 4.0, "transfer": 0.5, "bubble": 0.5, "expert": 0.0}))
    assert [(row.part, row.predicted, row.measured, row.lowest, row.highest) for row in rows] == [
        ("pipeline", 1.0, 4.0, 3.0, 5.0),
        ("linear", 4.0, 5.0, 4.0, 6.0),
        ("other", 0.0, 1.0, 1.0, 1.0),
    ]
    assert [row.ratio for row in rows] == [4.0, 1.25, None]
    total = compare_total(profiles, None)
    assert (total.predicted, total.measured) == (None, 10.0)
    assert sum(row.measured for row in rows) == total.measured
    assert profiler_slowdown(profiles) == pytest.approx(0.25)
    assert json.loads(json.dumps(profile_json(profiles, None)))["parts"][0]["part"] == "linear"


def test_a_gap_between_parts_and_the_step_is_told() -> None:
    profiles = [_profile(0, {"linear": 1.0}), _profile(1, {"linear": 1.0}, seconds=1.25)]
    assert largest_gap(profiles) == pytest.approx(0.2)


RECIPE = 'name = "small"\nsteps = 4\nmodel = { base = "tiny-llama" }\ndata = { shards = "none" }\n'


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--ranks", "0,x"], '--ranks: "x" must be the number of a rank'),
        (["--ranks", "0,2", "--nproc", "2"], "has 2, but there are 2 ranks"),
        (["-o", "nowhere/trace.json"], "the folder nowhere does not exist"),
    ],
)
def test_what_cannot_be_profiled_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: list[str], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipe.toml").write_text(RECIPE)
    result = CliRunner().invoke(app, ["profile", "recipe.toml", *options])
    assert result.exit_code != 0
    assert said in f"{result.output}{result.exception}"
