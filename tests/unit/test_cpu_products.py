"""Low-precision products of a CPU without instructions for them: in fp32, and nothing else changes."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from danlu.chips.cpu_products import emulated_dtypes

COMPARE = """
import torch
import torch.nn.functional as F
from torch import nn
from danlu.chips.cpu_products import compute_products_in_fp32

torch.manual_seed(0)
low = torch.bfloat16
layer = nn.Linear(48, 40).to(low)
x = torch.randn(3, 20, 48).to(low).requires_grad_()
heads = [torch.randn(2, count, 33, 16).to(low).requires_grad_() for count in (4, 2, 2)]
batch = torch.randn(3, 8, 16).to(low), torch.randn(3, 16, 8).to(low)


def run():
    y = layer(x)
    attended = F.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)
    leaves = [x, layer.weight, *heads]
    gradients = torch.autograd.grad((y.float() ** 2).sum() + (attended.float() ** 2).sum(), leaves)
    into = torch.empty(3, 8, 8, dtype=low)
    torch.bmm(*batch, out=into)
    return [y, attended, *gradients, torch.bmm(*batch), into, torch.compile(layer)(x)]


before, exact = run(), [each.float() for each in (layer.weight, x)]
assert compute_products_in_fp32([low])
assert compute_products_in_fp32([low]), "a second time changes nothing"
after = run()
for old, new in zip(before, after, strict=True):
    assert old.dtype == new.dtype and old.shape == new.shape
    assert (old.float() - new.float()).abs().max() <= 2**-6 * old.float().abs().max()
precise = F.linear(x.double(), layer.weight.double(), layer.bias.double()).to(low)
assert torch.equal(after[0], precise) or (after[0].float() - precise.float()).abs().max() <= 2**-7 * precise.abs().max()
wide = torch.randn(5, 6)
assert torch.allclose(wide @ wide.t(), (wide.double() @ wide.double().t()).float(), atol=1e-5)
print("compared")
"""


def test_results_and_gradients_are_the_same() -> None:
    """In a process of its own: torch's kernels are replaced for as long as it lives."""
    done = subprocess.run([sys.executable, "-W", "error::UserWarning", "-c", COMPARE], capture_output=True, text=True)
    assert done.stdout == "compared\n", done.stderr


@pytest.mark.parametrize(
    ("line", "emulated"),
    [
        ("flags\t\t: fpu avx512f", {torch.bfloat16, torch.float16}),
        ("flags\t\t: fpu avx512f avx512_bf16", {torch.float16}),
        ("flags\t\t: amx_bf16 amx_tile avx512_fp16", set()),
        ("Features\t: fp asimd fphp asimdhp bf16", set()),
        ("model name\t: says nothing", set()),
    ],
)
def test_the_processor_s_instructions_decide(line: str, emulated: set[torch.dtype], tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text(f"processor\t: 0\n{line}\n")
    assert emulated_dtypes(tmp_path / "cpuinfo") == emulated
    assert emulated_dtypes(tmp_path / "none") == frozenset()
