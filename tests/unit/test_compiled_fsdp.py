"""The check of compiled blocks under FSDP: its hooks see one forward and one backward pass, as without the check."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from danlu.compiler import blocks as blocks_module
from danlu.compiler.blocks import apply_compile
from danlu.compiler.verified_block import CompiledBlockChecks
from danlu.torch_compat import FSDPParamGroup, HashStore


class Inner(nn.Module):
    """Sharded on its own, as experts are."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.linear(x))


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner = nn.Linear(8, 8), Inner()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(self.first(x))


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("reshard", [True, False])
def test_a_step_is_the_same_with_the_check(
    mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, reshard: bool
) -> None:
    """Two layers, two microbatches, gradients accumulated; a compiler that returns what it is given stands in."""
    monkeypatch.setattr(blocks_module.torch, "compile", lambda forward, **_: forward)

    def step(check: bool) -> tuple[list[Tensor], list[int], CompiledBlockChecks]:
        torch.manual_seed(0)
        model = nn.Sequential(Outer(), Outer())
        checks = apply_compile(model, check=check)
        calls = [_count(monkeypatch, name) for name in ("post_forward", "post_backward")]
        policy = MixedPrecisionPolicy(param_dtype=dtype)
        for block in model:
            fully_shard(block.inner, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
            fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
        fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
        losses = []
        for _ in range(2):
            loss = model(torch.randn(4, 8, requires_grad=True)).float().square().mean()
            loss.backward()
            losses.append(loss.detach())
        gradients = [each.grad.full_tensor() for each in model.parameters() if each.grad is not None]
        return [*losses, *gradients], [len(each) for each in calls], checks

    plain, plain_calls, _ = step(False)
    checked, checked_calls, checks = step(True)
    assert len(plain) == 2 + 8
    assert all(torch.equal(one, other) for one, other in zip(plain, checked, strict=True))
    assert checked_calls == plain_calls
    assert min(plain_calls) >= 2 * 4, "two microbatches of two layers, each with a unit inside"
    assert [each.difference for each in checks.done] == [None]


def test_a_wrong_gradient_of_a_nested_unit_is_caught(mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(Outer())
    wrong = model[0].inner.linear

    def compile_block(forward: Callable[..., Any], **_: Any) -> Callable[..., Any]:
        return lambda x: forward(x) + 0 * wrong(x) + 0.1 * (wrong.bias - wrong.bias.detach())

    monkeypatch.setattr(blocks_module.torch, "compile", compile_block)
    apply_compile(model)
    fully_shard(model[0].inner, mesh=mesh)
    fully_shard(model, mesh=mesh)
    with pytest.warns(RuntimeWarning, match=r"gradient of inner\.linear\.bias"):
        model(torch.randn(4, 8))


def _count(monkeypatch: pytest.MonkeyPatch, name: str) -> list[int]:
    """A list with one entry for each call of a method of FSDP's groups of parameters from now on."""
    calls: list[int] = []
    method = getattr(FSDPParamGroup, name)

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return method(*args, **kwargs)

    monkeypatch.setattr(FSDPParamGroup, name, counted)
    return calls
