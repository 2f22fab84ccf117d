"""Bytes that an uncompiled layer moves: the formula against the operators that PyTorch runs, one by one."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from danlu.framework.decoder.block import Block
from danlu.ops import layer
from danlu.ops.layer_shard import LayerShard
from danlu.ops.model_shape import model_shape
from danlu.spec.model import MLAConfig, Model

NOT_COUNTED = ("mm", "scaled_dot_product", "_unsafe_view")
"""Matmuls and attention, which are timed by themselves, and a view by another name."""
LENGTH = 256
LATENT = {
    "mla": MLAConfig(q_lora_rank=192, kv_lora_rank=128, qk_rope_head_dim=32, qk_nope_head_dim=64, v_head_dim=64),
    "kv_heads": None,
}


class Moved(TorchDispatchMode):
    """Adds up what operators read and write; views move nothing."""

    total = 0

    def __torch_dispatch__(
        self, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        name = function._schema.name.partition("::")[2]  # type: ignore[attr-defined]
        if not function.is_view and not any(part in name for part in NOT_COUNTED):  # type: ignore[attr-defined]
            tensors = tree_leaves((args, kwargs or {}, result))
            self.total += sum(each.numel() * each.element_size() for each in tensors if isinstance(each, Tensor))
        return result


def moved_by(model: Model, dtype: torch.dtype) -> tuple[int, int]:
    """Of one block, forward and backward."""
    block = Block(model, 0)
    for name in ("q_a_norm", "kv_a_norm") if model.mla else ():
        old = block.attention.get_submodule(name)
        setattr(block.attention, name, nn.LayerNorm(*old.normalized_shape))  # type: ignore[misc]
    block = block.to(dtype)
    x = torch.randn(1, LENGTH, model.width, dtype=dtype, requires_grad=True)
    with Moved() as forward:
        y = block(x)
    with Moved() as backward:
        torch.autograd.backward(y, torch.ones_like(y))
    return forward.total, backward.total


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("changes", [{}, {"activation": "gelu"}, {"position": "learned"}, LATENT], ids=str)
def test_bytes_are_those_of_the_operators(changes: dict[str, Any], dtype: torch.dtype) -> None:
    """With LayerNorm, one kernel on a CPU too, as RMSNorm is on accelerators.

    Not counted: the tables of the rotation, which all heads share; here they are few.
    """
    model = Model(
        vocabulary=256, layers=1, width=512, heads=8, kv_heads=2, mlp_width=1536, sequence=LENGTH, norm="layer"
    ).model_copy(update=changes)
    shard = LayerShard(model_shape(model), 1, LENGTH, pad_values=True)
    told = layer.eager_moved_bytes(shard, False, dtype.itemsize, dispatch=0.0)
    assert told == pytest.approx(moved_by(model, dtype), rel=0.1)


def test_operators_of_a_gated_layer_move_little_more_than_a_compiler_s_kernels() -> None:
    """Each passes once over its tensors; what `compile` in a plan gains in memory traffic is small."""
    model = Model(vocabulary=256, layers=1, width=4096, heads=32, kv_heads=8, mlp_width=14336, sequence=LENGTH)
    shard = LayerShard(model_shape(model), 1, LENGTH)
    fused = layer.moved_bytes(shard, False, traffic=1.0, dispatch=0.0, fused_activation=False)
    eager = layer.eager_moved_bytes(shard, False, 2, dispatch=0.0)
    assert 1 < sum(eager) / sum(fused) < 1.2
