"""Bytes of a rank against the papers' own formulas."""

from dataclasses import replace

import pytest

from danlu.cost.memory import ReplicaCounts, microbatches_in_flight, state_bytes
from danlu.cost.parallel_layout import ParallelLayout
from danlu.cost.software import DANLU, HSDP, REPLICATED, ZERO_1, ZERO_2, ZERO_3, Sharding, Software
from danlu.cost.stage_contents import RankParameters, rank_parameters, stage_contents
from danlu.cost.step_prediction import Predictor
from danlu.ops.embedding_head import logit_elements
from danlu.ops.layer import saved_bytes
from danlu.ops.layer_shard import LayerShard
from danlu.ops.model_shape import model_shape
from danlu.spec.load import load_cluster, load_model
from danlu.spec.model import Model
from danlu.spec.plan import PipelineSchedule
from danlu.spec.recipe import BatchConfig

BILLION = RankParameters(dense=10**9, experts=0)
RANKS = ReplicaCounts(total=64, per_group=8)
GPT = Model(vocabulary=51200, layers=4, width=1024, heads=16, activation="gelu", position="learned", sequence=2048)
MEGATRON = Software(recompute="none", sequence_parallel=False)


def kept(software: Software = MEGATRON, tp: int = 1, cp: int = 1) -> float:
    """Bytes that a layer saves for its backward pass."""
    shard = LayerShard(model_shape(GPT), 1, 2048, tp, cp, sequence_parallel=software.sequence_parallel)
    return saved_bytes(shard, software.saving(software.recompute or "none", fp8=False), moe=False)


@pytest.mark.parametrize(
    ("sharding", "each"),
    [
        (REPLICATED, 2 + 4 + 12),
        (ZERO_1, 2 + 4 + 12 / 64),
        (ZERO_2, 2 + 4 / 64 + 12 / 64),
        (ZERO_3, 18 / 64),
        (HSDP, 18 / 8),
        (Sharding("group", "group", "all"), 6 / 8 + 12 / 64),
    ],
)
def test_bytes_a_parameter(sharding: Sharding, each: float) -> None:
    states = state_bytes(BILLION, RANKS, RANKS, sharding, Software())
    assert sum(states) == pytest.approx(each * 1e9)


def test_the_sharded_program_keeps_one_copy() -> None:
    states = state_bytes(BILLION, RANKS, RANKS, ZERO_3, Software(keep_half_parameters=False))
    assert sum(states) == pytest.approx(16 / 64 * 1e9)


def test_experts_are_split_over_fewer_ranks() -> None:
    some = RankParameters(dense=0, experts=10**9)
    states = state_bytes(some, RANKS, ReplicaCounts(total=4, per_group=2), ZERO_3, Software())
    assert sum(states) == pytest.approx(18 / 4 * 1e9)


def test_activations_of_a_layer_as_published() -> None:
    # Korthikanti et al. (2022): 34 · s · b · h with flash attention, two of them masks of dropout, which is not used
    stream = 2048 * 1024
    assert kept() == pytest.approx(32 * stream)
    # without sequence parallelism: s · b · h · (8 + 24 / t)
    assert kept(tp=4) == pytest.approx((8 + 24 / 4) * stream)
    # with it everything is divided
    spread = replace(MEGATRON, sequence_parallel=True)
    assert kept(spread, tp=4) == pytest.approx(32 / 4 * stream)


def test_recompute_keeps_the_input_alone() -> None:
    full = replace(MEGATRON, recompute="full")
    assert kept(full) == 2 * 2048 * 1024


def test_scores_in_memory_take_five_bytes_each() -> None:
    old = replace(MEGATRON, attention="fused")
    assert kept(old) - kept() == 5 * 16 * 2048**2
    selective = replace(old, recompute="selective")
    assert kept(selective) == pytest.approx(32 * 2048 * 1024)


def test_context_parallelism_divides_tokens() -> None:
    assert kept(cp=2) == pytest.approx(kept() / 2)


@pytest.mark.parametrize(
    ("schedule", "rank", "stages", "microbatches", "held_at_once"),
    [
        ("1f1b", 0, 1, 32, 8),
        ("1f1b", 7, 1, 32, 1),
        ("1f1b", 0, 1, 4, 4),
        ("gpipe", 3, 1, 32, 32),
        ("interleaved", 0, 2, 32, (2 * 7 + 8 + 1) / 2),
        ("interleaved", 7, 2, 32, (8 + 1) / 2),
    ],
)
def test_microbatches_in_flight(schedule: str, rank: int, stages: int, microbatches: int, held_at_once: float) -> None:
    assert microbatches_in_flight(rank, 8, stages, microbatches, schedule) == held_at_once  # type: ignore[arg-type]


def test_interleaving_holds_more_as_published() -> None:
    # SC 2021: 1 + (p − 1) / (p · v) times the activations of 1F1B on the first rank
    ratio = microbatches_in_flight(0, 8, 4, 64, "interleaved") / microbatches_in_flight(0, 8, 1, 64, "1f1b")
    assert ratio == pytest.approx(1 + 7 / 32, abs=0.02)


def test_logits_of_a_large_vocabulary() -> None:
    shard = LayerShard(model_shape(GPT), 1, 2048, tp=4)
    assert MEGATRON.logit_bytes * logit_elements(shard) == 14 * 2048 * 51200 / 4


def test_parameters_of_the_stages_are_those_of_the_model() -> None:
    model = load_model("mixtral-8x7b")
    shape = model_shape(model)
    whole = rank_parameters(shape, stage_contents(shape, 1, 1)[0], 1, 1, 1)
    assert whole.dense + whole.experts == pytest.approx(46.7e9, rel=0.002)
    parts = [rank_parameters(shape, holding, 2, 8, 1) for holding in stage_contents(shape, 4, 2)]
    assert sum(part.experts for part in parts) * 8 == whole.experts
    assert sum(part.dense for part in parts) * 2 == pytest.approx(whole.dense, rel=1e-6)


def test_embedding_and_head_may_count_as_layers() -> None:
    shape = model_shape(replace_layers(70))
    counts = [holding.layers for holding in stage_contents(shape, 12, 1, count_embedding_and_head=True)]
    assert counts == [5, *[6] * 10, 5]
    assert [holding.layers for holding in stage_contents(shape, 12, 1)] == [5, *[6] * 10, 5]
    assert [holding.layers for holding in stage_contents(shape, 2, 1, (30, 40))] == [30, 40]


def replace_layers(layers: int) -> Model:
    return GPT.model_copy(update={"layers": layers})


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zero-bubble"])
def test_the_fullest_rank_is_found_wherever_it_is(schedule: PipelineSchedule) -> None:
    """Layers without experts come first: of eight ranks the third is the first that has experts alone."""
    model = load_model("deepseek-v3").model_copy(update={"layers": 35, "mtp": None})
    stages = 1 if schedule == "1f1b" else 2
    layout = ParallelLayout(pp=8, shard=8, ep=8, microbatches=16, schedule=schedule, stages_per_rank=stages)
    predictor = Predictor(model, BatchConfig(sequences=128, length=4096), load_cluster("h100-pod"), DANLU)
    estimates = predictor.memory_by_pp_rank(layout)
    fullest = max(range(8), key=lambda rank: estimates[rank].allocated)
    assert predictor.memory(layout).allocated == estimates[fullest].allocated
    assert fullest not in (0, 1, 7) or schedule != "1f1b"
    limit = estimates[fullest].device_bytes
    assert predictor.fits(layout, limit) and not predictor.fits(layout, limit - 1)
