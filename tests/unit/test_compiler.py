"""Compiled blocks against eager ones, where they run; wrong compilers and wrong rewrites are planted."""

import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from danlu.compiler import blocks as blocks_module
from danlu.compiler.blocks import apply_compile
from danlu.compiler.equivalence import find_difference
from danlu.framework.decoder.block import Block
from danlu.memory.recompute import RecomputeRegion, apply_recompute
from danlu.spec.model import Model, Moe

# What torch says while it loads its compiler and traces; none of it is about the blocks.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.*"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore:.*torch.autograd.function.Function.* should not be instantiated"),
]
MOE = Moe(experts=8, top_k=2, width=32, shared=1)


@pytest.fixture(autouse=True)
def fresh_compiler() -> None:
    torch.compiler.reset()


class Joined(nn.Module):
    """What Inductor gets wrong in 16 bits on some machines with AVX-512: a join of transposed matrices."""

    def __init__(self) -> None:
        super().__init__()
        drawn = torch.Generator().manual_seed(0)
        for name, rows in (("a", 128), ("b", 64), ("c", 64)):
            setattr(self, name, nn.Parameter(torch.randn(rows, 128, generator=drawn) / 11))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x @ torch.cat([self.a.t(), self.b.t(), self.c.t()], 1)


def decoder_block(dtype: torch.dtype, moe: Moe | None = None, width: int = 64, layer: int = 0) -> Block:
    heads = {"heads": width // 16, "kv_heads": width // 32}
    block = Block(
        Model(vocabulary=64, layers=2, width=width, mlp_width=4 * width, sequence=64, moe=moe, **heads), layer
    )
    drawn = torch.Generator().manual_seed(layer)
    with torch.no_grad():
        for parameter in block.parameters():
            noise = torch.randn(parameter.shape, generator=drawn)
            parameter.copy_(noise * width**-0.5 if parameter.ndim > 1 else 1 + 0.1 * noise)
    return block.to(dtype)


def hidden_states(dtype: torch.dtype, width: int = 64, seed: int = 9) -> Tensor:
    drawn = torch.Generator().manual_seed(seed)
    return torch.randn(2, 64, width, generator=drawn).to(dtype).requires_grad_()


Compiler = Callable[[Callable[..., Any]], Callable[..., Any]]


def plant(monkeypatch: pytest.MonkeyPatch, compiler: Compiler) -> list[int]:
    """Let another compiler stand in for Inductor; returns a list with one entry for each block it compiled."""
    compiled: list[int] = []

    def compile_block(forward: Callable[..., Any], **_: Any) -> Callable[..., Any]:
        compiled.append(1)
        return compiler(forward)

    monkeypatch.setattr(blocks_module.torch, "compile", compile_block)
    return compiled


def columns_mixed(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A compiler that shifts the columns of every result, as the real fault does."""
    return lambda *args: forward(*args).roll(1, -1)


class _Unequal(torch.autograd.Function):
    """Returns what it gets, and scales the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0] * 1.1


def gradient_scaled(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A compiler whose forward is right, and whose backward is off by a tenth."""
    return lambda *args: _Unequal.apply(forward(*args))


def one_element_wrong(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A compiler that gets the last element wrong: a loop that ends too early."""

    def compiled(*args: Any) -> Tensor:
        found = forward(*args)
        keep = torch.ones_like(found)
        keep.view(-1)[-1] = 0
        return found * keep

    return compiled


def test_inductors_fault_is_caught_with_a_file_that_reproduces_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The real fault where this machine has it; where Inductor is right, it is planted in what Inductor returns."""
    block, x = Joined().bfloat16(), hidden_states(torch.bfloat16, 128)
    with torch.no_grad():
        wrong_here = not torch.equal(torch.compile(block.forward)(x), block.forward(x))
    if not wrong_here:
        real = torch.compile
        plant(monkeypatch, lambda forward: columns_mixed(real(forward)))
    block.calls.zero_()
    checks = apply_compile([block], reproduce_in=tmp_path / "differences")
    with pytest.warns(RuntimeWarning, match=r"compiled block 0 \(Joined\) differs from eager: .* error of") as caught:
        first = block(x)
    assert torch.equal(first, x @ torch.cat([block.a.t(), block.b.t(), block.c.t()], 1)), "it must run eagerly"
    (check,) = checks.done
    assert check.runs_eagerly
    assert check.difference is not None
    assert check.reproduction is not None
    assert str(check.reproduction) in str(caught[0].message)
    assert "run eagerly from now on" in str(caught[0].message)
    assert block.calls == 1, "only the call itself may count"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        block(x)  # once is enough
    ran = subprocess.run([sys.executable, check.reproduction], capture_output=True, text=True, check=False)
    assert ran.returncode == int(wrong_here), ran.stderr
    assert "gradient of a" in ran.stdout


@pytest.mark.parametrize("compiler", [columns_mixed, gradient_scaled, one_element_wrong])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_wrong_compiler_is_caught(monkeypatch: pytest.MonkeyPatch, compiler: Compiler, dtype: torch.dtype) -> None:
    plant(monkeypatch, compiler)
    block, x = decoder_block(dtype), hidden_states(dtype)
    checks = apply_compile([block])
    with pytest.warns(RuntimeWarning, match="differs from eager"):
        block(x)
    assert checks.done[0].runs_eagerly


def test_a_wrong_buffer_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    block, x = Joined(), hidden_states(torch.float32, 128)

    def counts_twice(forward: Callable[..., Any]) -> Callable[..., Any]:
        def compiled(*args: Any) -> Any:
            block.calls += 1
            return forward(*args)

        return compiled

    plant(monkeypatch, counts_twice)
    apply_compile([block])
    with pytest.warns(RuntimeWarning, match="buffer calls"):
        block(x)


@pytest.mark.parametrize(
    ("dtype", "moe"),
    [
        pytest.param(torch.bfloat16, MOE, id="experts, bf16", marks=pytest.mark.full),
        pytest.param(torch.bfloat16, None, id="dense, bf16", marks=pytest.mark.full),
        pytest.param(torch.float32, MOE, id="experts, fp32", marks=pytest.mark.full),
        pytest.param(torch.float32, None, id="dense, fp32", marks=pytest.mark.full),
    ],
)
def test_no_false_alarm(dtype: torch.dtype, moe: Moe | None) -> None:
    """Real Inductor, real blocks: two of a kind share one check, and warnings are errors."""
    blocks = [decoder_block(dtype, moe, layer=layer) for layer in range(2)]
    checks = apply_compile(blocks)
    x = hidden_states(dtype)
    blocks[1](blocks[0](x)).float().square().mean().backward()
    (check,) = checks.done
    assert not check.runs_eagerly
    assert check.not_checked == ""
    assert 0 < checks.seconds < 60


@pytest.mark.full
@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("moe", [None, MOE], ids=["dense", "experts"])
def test_no_false_alarm_on_other_inputs(dtype: torch.dtype, moe: Moe | None, seed: int) -> None:
    block = decoder_block(dtype, moe)
    checks = apply_compile([block])
    block(hidden_states(dtype, seed=seed)).float().square().mean().backward()
    assert not checks.done[0].runs_eagerly


@pytest.mark.parametrize(
    "recompute", [pytest.param(False, id="kept", marks=pytest.mark.full), pytest.param(True, id="recomputed")]
)
def test_the_check_leaves_no_trace_in_the_step(recompute: bool) -> None:
    """The same bits with the check and without it: results, gradients, buffers, and the random state after it."""

    def step(check: bool) -> list[Tensor]:
        torch.compiler.reset()
        block = decoder_block(torch.float32, MOE)
        if recompute:
            apply_recompute([RecomputeRegion(block, "full")])
        apply_compile([block], check=check)
        for parameter in block.parameters():
            parameter.grad = torch.full_like(parameter, 0.5)  # of an earlier microbatch
        torch.manual_seed(5)
        x = hidden_states(torch.float32)
        y = block(x)
        y.square().mean().backward()
        assert x.grad is not None
        gradients = [each.grad for each in block.parameters() if each.grad is not None]
        return [y.detach(), x.grad, *gradients, *block.buffers(), torch.get_rng_state()]

    for unchecked, checked in zip(step(False), step(True), strict=True):
        assert torch.equal(unchecked, checked)


def test_kinds_share_a_check_and_settings_part_them(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = plant(monkeypatch, lambda forward: forward)
    blocks = [Joined() for _ in range(3)]
    blocks[2].window = 4
    checks = apply_compile(blocks)
    for x in (hidden_states(torch.float32, 128), hidden_states(torch.float32, 128, seed=2)):
        for block in blocks:
            block(x)
    assert len(compiled) == 3
    assert [check.block for check in checks.done] == ["block 0 (Joined)", "block 2 (Joined)"]
    with torch.no_grad():
        blocks[0](hidden_states(torch.float32, 128))  # another graph: no gradients
    blocks[0](hidden_states(torch.float32, 128)[:1])  # another shape
    assert len(checks.done) == 4


def test_ranks_agree_by_what_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    plant(monkeypatch, lambda forward: forward)
    block = Joined()
    checks = apply_compile([block], decide=lambda differs: bool(asked.append(differs)) or True)
    block(hidden_states(torch.float32, 128))
    assert asked == [False]
    assert checks.done[0].runs_eagerly, "another rank found a difference"


def test_blocks_that_draw_random_numbers_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, lambda forward: forward)
    block = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5))
    checks = apply_compile([block])
    state = torch.get_rng_state()
    with pytest.warns(RuntimeWarning, match="not compared with eager: it draws random numbers"):
        block(torch.ones(2, 8, requires_grad=True))
    assert "random numbers" in checks.done[0].not_checked
    assert not torch.equal(state, torch.get_rng_state()), "the call itself draws"


def test_ever_new_shapes_end_the_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, lambda forward: forward)
    block = nn.Linear(4, 4)
    checks = apply_compile([block])
    for rows in range(1, 17):
        block(torch.ones(rows, 4))
    with pytest.warns(RuntimeWarning, match="ever new shapes"):
        block(torch.ones(17, 4))
    block(torch.ones(18, 4))
    assert [check.not_checked == "" for check in checks.done] == 16 * [True] + 2 * [False]


def test_a_block_that_knows_no_wider_dtype_is_compared_with_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    class OnlyFp32(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            if x.dtype != torch.float32:
                raise TypeError("must be fp32")
            return super().forward(x)

    plant(monkeypatch, lambda forward: forward)
    good, bad = OnlyFp32(8, 8), OnlyFp32(8, 8)
    checks = apply_compile([good])
    good(torch.ones(4, 8))
    assert not checks.done[0].runs_eagerly
    plant(monkeypatch, one_element_wrong)
    apply_compile([bad])
    with pytest.warns(RuntimeWarning, match="output 0"):
        bad(torch.ones(4, 8))


class TestEquivalence:
    truth = torch.linspace(-1, 1, 1000, dtype=torch.float64)

    def difference(self, compiled: Tensor, dtype: torch.dtype = torch.bfloat16) -> Any:
        return find_difference({"y": self.truth}, [{"y": self.truth.to(dtype)}], {"y": compiled})

    def test_rounding_is_allowed_and_little_more(self) -> None:
        rounded = self.truth.bfloat16()
        assert self.difference(rounded) is None
        assert self.difference(rounded * (1 + torch.finfo(torch.bfloat16).eps)) is None
        found = self.difference(rounded * 1.06)
        assert found is not None
        assert found.tensor == "y"

    def test_many_small_errors_are_found(self) -> None:
        """Below the bound of the largest error, all with one sign and size."""
        found = self.difference(self.truth.bfloat16() + 0.014)
        assert found is not None
        assert found.measure == "root mean square"

    def test_nan_is_found(self) -> None:
        wrong = self.truth.bfloat16()
        wrong[3] = float("nan")
        found = self.difference(wrong)
        assert found is not None
        assert found.error == 1

    def test_a_missing_gradient_is_zero(self) -> None:
        zeros = torch.zeros(4)
        assert find_difference({}, [{}], {"y": zeros}) is None
        assert find_difference({"y": zeros + 1}, [{"y": zeros + 1}], {}) is not None
