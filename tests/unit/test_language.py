"""Kernels against their references in Triton's interpreter; compiled without a chip, within their budgets."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kernel_cases import CASES, PLANTED

from danlu.chips.kernel_targets import INTERPRETER, TARGETS, target_of
from danlu.language import Kernel, Tile, TileNeeds, tiles_for
from danlu.language.checking import check_implementation
from danlu.language.register import checked_implementation, register_kernels, why_no_kernels
from danlu.ops.operators.cross_entropy import CROSS_ENTROPY
from danlu.ops.operators.experts import GROUPED_MM
from danlu.ops.operators.gated import GATED_PRODUCT
from danlu.ops.operators.masked_attention import MASKED_ATTENTION
from danlu.ops.operators.norm import RMS_NORM
from danlu.ops.operators.rotary import ROTATE
from danlu.torch_compat import grouped_mm

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
NO_TRITON = "triton is not installed: pip install 'danlu[kernels]'"
KERNELS = (
    "rms_norm", "rms_norm_backward", "gated_product", "gated_product_backward", "rotate", "softmax_sums",
    "cross_entropy_backward", "grouped_mm", "grouped_mm_input_gradient", "grouped_mm_weight_gradient", "attention",
    "attention_backward_queries", "attention_backward_keys", "adamw", "fp8_cast",
)  # fmt: skip
QUICK = [(name, "sm_90") for name in KERNELS] + [("rms_norm_backward", "gfx942"), ("grouped_mm", "gfx942")]
REST = [(name, target) for name in KERNELS for target in TARGETS if (name, target) not in QUICK]


# ---- what they compute


@pytest.fixture(scope="module")
def interpreted() -> dict[str, list[str]]:
    """What every case found wrong, from one process: Triton interprets if that is set before it is imported."""
    triton = pytest.importorskip("triton", reason=NO_TRITON)
    if triton.__version__ < "3.7" and np.__version__ >= "2.4":
        pytest.skip(f"the interpreter of Triton {triton.__version__} needs numpy before 2.4")
    command = [sys.executable, str(HERE / "kernel_cases.py")]
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    found = {case["case"]: case["problems"] for case in map(json.loads, run.stdout.splitlines())}
    # A thread of torch 2.12 with CUDA was seen to abort the process at its end.
    assert run.returncode == 0 or torch.version.cuda, run.stderr
    assert found.keys() == {*CASES, *PLANTED}, run.stderr
    return found


@pytest.mark.parametrize("case", CASES)
def test_a_kernel_computes_what_its_reference_does(interpreted: dict[str, list[str]], case: str) -> None:
    assert interpreted[case] == []


def test_a_wrong_mask_is_caught(interpreted: dict[str, list[str]]) -> None:
    assert len(interpreted["wrong mask"]) == 6, "both shapes, result and both gradients"
    assert all("is off by" in each for each in interpreted["wrong mask"])


def test_a_wrong_kernel_is_not_used_and_that_is_said_once(interpreted: dict[str, list[str]]) -> None:
    warning, *runs = interpreted["wrong mask in use"]
    assert warning.startswith("RuntimeWarning: the kernel of rms_norm is not used, because it differs")
    assert len(runs) == 1
    assert runs[0] in ("native", "torch")


@pytest.mark.parametrize(
    "operator",
    [RMS_NORM, GATED_PRODUCT, ROTATE, CROSS_ENTROPY, MASKED_ATTENTION, GROUPED_MM],
    ids=lambda each: each.name,
)
def test_the_comparison_accepts_torch_and_finds_what_differs_little(operator: Any) -> None:
    good = operator.implementations[0]
    assert check_implementation(operator, good, "cpu", torch.float32) == []

    def slightly_off(*inputs: Any) -> Any:
        result = good.forward(*inputs)
        return (result[0] * (1 + 2.0**-16), *result[1:]) if isinstance(result, tuple) else result * (1 + 2.0**-16)

    found = check_implementation(operator, replace(good, forward=slightly_off), "cpu", torch.float32)
    assert found
    assert 2.0**-18 < found[0].error < 2.0**-14


def test_what_is_not_a_number_counts_as_different() -> None:
    good = RMS_NORM.implementations[0]
    wrong = replace(good, forward=lambda *inputs: tuple(each * float("nan") for each in good.forward(*inputs)))
    assert check_implementation(RMS_NORM, wrong, "cpu", torch.float32)


def test_a_kernel_that_fails_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("danlu.language.register.why_no_kernels", lambda device_type: None)

    def fails(*inputs: Any) -> Any:
        raise RuntimeError("no such instruction")

    implementation = checked_implementation(RMS_NORM, fails, fails, "cpu")
    with pytest.warns(RuntimeWarning, match="no such instruction"):
        assert not implementation.takes(torch.ones(2, 2))
    assert not implementation.takes(torch.ones(2, 2)), "said once"


# ---- without Triton, and without a chip


def test_the_room_loads_without_triton() -> None:
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "import danlu.language as language\n"
        "assert language.register_kernels('cpu') == []\n"
        "assert 'not installed' in language.register.why_no_kernels('cpu')\n"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=360).returncode == 0


def test_a_cpu_has_no_kernels_outside_of_the_interpreter() -> None:
    pytest.importorskip("triton", reason=NO_TRITON)
    reason = why_no_kernels("cpu")
    assert reason is not None
    assert "TRITON_INTERPRET" in reason
    before = list(RMS_NORM.implementations)
    try:
        assert "rms_norm" in register_kernels("cpu")
        with pytest.warns(RuntimeWarning, match="the kernel of rms_norm is not used: .*TRITON_INTERPRET"):
            assert RMS_NORM.implementation(torch.ones(2, 2)).name != "triton"
    finally:
        for operator in _registered():
            operator.implementations[:] = [each for each in operator.implementations if each.name != "triton"]
    assert RMS_NORM.implementations == before


@pytest.mark.parametrize(
    ("target", "expected"),
    [("sm_80", "triton"), ("sm_90", "torch_grouped"), ("gfx942", "triton")],
)
def test_torch_multiplies_experts_where_that_is_one_kernel(
    monkeypatch: pytest.MonkeyPatch, target: str, expected: str
) -> None:
    pytest.importorskip("triton", reason=NO_TRITON)
    if expected == "torch_grouped" and grouped_mm is None:
        pytest.skip("torch 2.9 has no grouped product")
    monkeypatch.setattr("danlu.language.register.why_no_kernels", lambda device_type: None)
    monkeypatch.setattr("danlu.language.launch.current_target", lambda device_type: TARGETS[target])
    monkeypatch.setattr("danlu.language.register.check_implementation", lambda *_: [])
    monkeypatch.setattr("torch.accelerator.current_device_index", lambda: None)
    x, weight = torch.empty(4, 8, device="meta", dtype=torch.bfloat16), torch.empty(2, 8, 16, device="meta")
    try:
        register_kernels("meta")
        assert GROUPED_MM.implementation(x, weight).name == expected
        assert GROUPED_MM.implementation(x.half(), weight).name == "triton", "torch's is for bf16"
        assert GROUPED_MM.implementation(x.double(), weight).name == "torch"
    finally:
        for operator in _registered():
            operator.implementations[:] = [each for each in operator.implementations if each.name != "triton"]


def _registered() -> Iterator[Any]:
    from danlu.language.register import _kernels

    yield from (operator for operator, _, _ in _kernels())


# ---- the pages


def python_blocks(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text("utf-8"), re.DOTALL)


def test_the_readme_s_example_runs() -> None:
    (example,) = python_blocks("src/danlu/language/README.md")
    exec(compile(example, "README.md", "exec"), {})


@pytest.mark.parametrize("step", ["check", "compile"])
def test_the_how_to_prints_what_it_shows(tmp_path: Path, step: str) -> None:
    pytest.importorskip("triton", reason=NO_TRITON)
    (tmp_path / "mine.py").write_text(python_blocks("docs/how-to/kernel.md")[0], "utf-8")
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path), "TRITON_INTERPRET": str(int(step == "check"))}
    run = subprocess.run(
        [sys.executable, "mine.py", step], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600
    )
    assert run.returncode == 0, run.stderr
    shown, printed = (ROOT / "docs/how-to/kernel.md").read_text("utf-8"), f"python mine.py {step}\n{run.stdout}```"
    if torch.__version__ < (2, 13):  # the page is of the Triton of 2.13; others take a few registers more or fewer
        printed, shown = (re.sub(r"\d+ registers", "registers", text) for text in (printed, shown))
    assert printed in shown


# ---- tiles follow the target


def square(**settings: Any) -> Kernel:
    """A product of matrices in tiles of 256, 128 and 16."""
    return Kernel(
        name="square",
        function=None,
        arguments={},
        grid=lambda shapes, constants: (1,),
        tiles=tuple(Tile({"SIZE": size}, 256, 2) for size in (256, 128, 16)),
        needs=lambda shapes, constants, tile, element_bytes: TileNeeds(
            values=0,
            sums=constants["SIZE"] ** 2,
            operands=constants["SIZE"] * 16,
            shared_bytes=tile.stages * constants["SIZE"] * 128 * element_bytes,
        ),
        example={},
        **settings,
    )


def test_the_largest_tile_that_fits_is_taken() -> None:
    chosen = {name: tiles_for(square(), target, {}).sizes["SIZE"] for name, target in TARGETS.items()}
    # 256² sums are 256 registers a thread: only chips with accumulators of their own have them, and gfx942 has not
    # the 128 KiB of shared memory for its two stages.
    assert chosen == {"sm_80": 128, "sm_90": 128, "sm_100": 128, "gfx942": 128, "gfx950": 256}
    assert tiles_for(square(), TARGETS["gfx942"], {}, element_bytes=4).sizes["SIZE"] == 16


def test_warps_are_the_target_s() -> None:
    assert [Tile(threads=256).warps(TARGETS[name]) for name in ("sm_90", "gfx942")] == [8, 4]


def test_what_fits_nowhere_says_why() -> None:
    small = replace(TARGETS["sm_90"], shared_bytes=1024)
    with pytest.raises(ValueError, match=r"no tile of square fits sm_90 .*\{'SIZE': 16\}: 8192 bytes of shared memory"):
        tiles_for(square(), small, {})


def test_a_device_that_is_not_listed_gets_the_nearest_older() -> None:
    backend, other = TARGETS["sm_90"].backend, TARGETS["gfx942"].backend
    assert target_of(backend, 89).name == "sm_80"
    assert target_of(backend, 103).name == "sm_100"
    assert target_of(other, "gfx942:sramecc+:xnack-").name == "gfx942"
    with pytest.raises(ValueError, match="sm_80 or newer"):
        target_of(backend, 75)
    with pytest.raises(ValueError, match="but this device is xpu"):
        target_of("xpu", 1)


@pytest.mark.parametrize("element_bytes", [2, 4])
def test_every_kernel_has_a_tile_on_every_target(element_bytes: int) -> None:
    pytest.importorskip("triton", reason=NO_TRITON)
    from danlu.language.catalog import KERNELS as ALL

    assert tuple(ALL) == KERNELS
    for kernel in ALL.values():
        for target in (*TARGETS.values(), INTERPRETER):
            tile = tiles_for(kernel, target, kernel.example, element_bytes)
            assert min(kernel.grid(kernel.example, kernel.constants(kernel.example, tile, target))) > 0


# ---- compiled without a chip


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """`danlu.language.compilation`, with nothing compiled before."""
    triton = pytest.importorskip("triton", reason=NO_TRITON)
    from danlu.language import compilation

    with triton.knobs.cache.scope():
        triton.knobs.cache.dir = str(tmp_path_factory.mktemp("triton"))
        yield compilation


def assert_within_budget(compiler: Any, name: str, target: str) -> None:
    kernel = compiler.KERNELS[name]
    use = compiler.compile_kernel(kernel, TARGETS[target])
    assert compiler.BUDGETS[name, target].breaches(use) == []
    assert use.registers > 0
    assert bool(use.matrix_instructions) == kernel.uses_matrix_unit


@pytest.mark.parametrize(("name", "target"), QUICK)
def test_a_kernel_compiles_within_its_budget(compiler: Any, name: str, target: str) -> None:
    assert_within_budget(compiler, name, target)


@pytest.mark.full
@pytest.mark.parametrize(("name", "target"), REST)
def test_every_other_kernel_compiles_within_its_budget(compiler: Any, name: str, target: str) -> None:
    assert_within_budget(compiler, name, target)


def test_budgets_allow_no_spills_and_no_more_than_the_target_has(compiler: Any) -> None:
    assert set(compiler.BUDGETS) == set(QUICK) | set(REST)
    for (name, target), budget in compiler.BUDGETS.items():
        limits = TARGETS[target].registers, TARGETS[target].shared_bytes
        assert (budget.registers, budget.shared_bytes, budget.spill_bytes) == (*limits, 0), name


def test_a_huge_tile_breaks_the_budget(compiler: Any) -> None:
    kernel, target = compiler.KERNELS["rms_norm_backward"], TARGETS["sm_90"]
    huge = Tile({"ELEMENTS": 16384}, 128)
    assert "registers a thread" in kernel.why_not(target, kernel.example, huge), "and would not have been chosen"
    use = compiler.compile_kernel(kernel, target, tile=huge)
    breaches = compiler.BUDGETS["rms_norm_backward", "sm_90"].breaches(use)
    assert any("bytes of spills" in breach for breach in breaches)
