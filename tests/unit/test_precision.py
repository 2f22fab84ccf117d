"""Dtypes by group of layers: which group a unit falls in, and what really runs."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from danlu.comm.mesh import ParallelMesh, build_mesh
from danlu.comm.rendezvous import RankInfo, rendezvous
from danlu.comm.world import World
from danlu.framework.build import build_train_state
from danlu.framework.precision import compute_dtype, mixed_precision_policy
from danlu.framework.state import TrainState
from danlu.parallel.batch import Batch
from danlu.spec.load import load_model
from danlu.spec.plan import Plan
from danlu.spec.recipe import BatchConfig, DataConfig, LayerPrecision, PrecisionConfig, Recipe

FP32, BF16 = torch.float32, torch.bfloat16


@pytest.fixture
def mesh() -> Iterator[ParallelMesh]:
    """A world of one rank: sharding there does nothing but cast."""
    world = World.join(RankInfo(), "gloo", rendezvous(RankInfo()))
    yield build_mesh(Plan(), World.adopt(), None, experts=True)
    world.shutdown()


def recipe(model: str, precision: PrecisionConfig, **changes: Any) -> Recipe:
    return Recipe(
        name="precision",
        steps=1,
        model=load_model(model).model_copy(update={"layers": 2} | changes),
        data=DataConfig(shards="none"),
        batch=BatchConfig(sequences=2, length=8),
        precision=precision,
    )


# --- groups


def test_the_last_group_that_matches_wins() -> None:
    precision = PrecisionConfig(
        compute="bf16",
        reduce="bf16",
        layers=(
            LayerPrecision(match="blocks.*", compute="fp32"),
            LayerPrecision(match="blocks.[2-9]", compute="bf16", reduce="bf16"),
            LayerPrecision(match="blocks.*.mlp.experts", compute="fp16"),
        ),
    )
    found = {unit: compute_dtype(precision, unit) for unit in ("embed", "blocks.0", "blocks.2", "blocks.12", "head")}
    assert found == {"embed": BF16, "blocks.0": FP32, "blocks.2": BF16, "blocks.12": FP32, "head": BF16}
    assert compute_dtype(precision, "blocks.2.mlp.experts") == torch.float16
    assert mixed_precision_policy(precision, "blocks.0").reduce_dtype == FP32
    assert mixed_precision_policy(precision, "blocks.2").reduce_dtype == BF16


def test_plain_fp32_casts_nothing_and_a_group_beside_it_casts_every_input() -> None:
    assert mixed_precision_policy(PrecisionConfig(), "head") == MixedPrecisionPolicy()
    mixed = PrecisionConfig(layers=(LayerPrecision(match="blocks.0", compute="bf16"),))
    assert mixed_precision_policy(mixed, "head") == MixedPrecisionPolicy(param_dtype=FP32, reduce_dtype=FP32)


# --- what runs


def seen_dtypes(state: TrainState, names: list[str]) -> dict[str, tuple[torch.dtype, torch.dtype, torch.dtype]]:
    """Dtypes of input, weight and output of the named modules, filled in by the next forward pass."""
    seen: dict[str, tuple[torch.dtype, torch.dtype, torch.dtype]] = {}

    def watch(name: str) -> Any:
        def hook(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            seen[name] = (inputs[0].dtype, next(module.parameters()).dtype, output.dtype)

        return hook

    for name in names:
        state.stage_modules[0].get_submodule(name).register_forward_hook(watch(name))
    return seen


def test_one_block_in_bf16_computes_in_bf16_and_everything_is_kept_in_fp32(mesh: ParallelMesh) -> None:
    precision = PrecisionConfig(layers=(LayerPrecision(match="blocks.1", compute="bf16"),))
    state, forward_backward = build_train_state(recipe("tiny-llama", precision), Plan(), mesh)
    seen = seen_dtypes(state, ["blocks.0.attention.q", "blocks.1.attention.q", "blocks.1.mlp.down", "head.score"])
    tokens = torch.randint(256, (2, 8), generator=torch.Generator().manual_seed(0))
    loss = forward_backward(Batch(tokens, tokens))
    assert seen == {
        "blocks.0.attention.q": (FP32,) * 3,
        "blocks.1.attention.q": (BF16,) * 3,
        "blocks.1.mlp.down": (BF16,) * 3,
        "head.score": (FP32,) * 3,
    }
    assert loss.dtype == FP32
    for name, parameter in state.named_parameters():
        assert parameter.dtype == FP32, name
        assert parameter.grad is not None and parameter.grad.dtype == FP32, name


def test_bf16_everywhere_is_near_fp32_and_not_the_same(mesh: ParallelMesh) -> None:
    tokens = torch.randint(256, (2, 8), generator=torch.Generator().manual_seed(0))
    losses = [
        float(build_train_state(recipe("tiny-moe", precision), Plan(), mesh)[1](Batch(tokens, tokens)))
        for precision in (PrecisionConfig(), PrecisionConfig(compute="bf16"))
    ]
    assert losses[0] == pytest.approx(losses[1], rel=5e-3)
    assert losses[0] != losses[1]


def test_optimizer_states_are_kept_in_fp32(mesh: ParallelMesh) -> None:
    state, _ = build_train_state(recipe("tiny-llama", PrecisionConfig(compute="bf16", reduce="bf16")), Plan(), mesh)
    tensors = state.tensors()
    assert {tensor.dtype for tensor in tensors.values()} == {FP32}
    assert any(name.endswith(".exp_avg_sq") for name in tensors)
