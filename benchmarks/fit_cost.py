"""Fit the constants of `danlu.cost` on the published rows whose set begins with `fit-`, and on nothing else.

    python benchmarks/fit_cost.py                     # writes src/danlu/cost/calibration.toml
    python benchmarks/validation/validate.py          # what it changed

Starts from `START` and `OVERHEADS`, moves one constant at a time by a factor, keeps what lowers the mean absolute error
of the logarithm, and shortens the steps: the same rows give the same file, in about a minute. A weak regularization
keeps constants that few rows determine near their start.
"""

import csv
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from math import log, sqrt
from pathlib import Path

import tomli_w
from rich.progress import Progress
from validation.published_runs import DATA_DIR, PublishedRun, load_runs

from danlu.cost.calibration import CALIBRATION_FILE, VENDOR_SUFFIX, Calibration, ChipEfficiency, Overheads
from danlu.cost.operator_time import DeviceModel, flash_attention_time, matmul_time

START = ChipEfficiency(
    matmul=0.75,
    weight_gradient=0.95,
    grouped_gemm=0.85,
    fp8=0.75,
    wave_quantization=0.7,
    half_speed_k=128.0,
    attention_forward=0.5,
    attention_backward=0.42,
    attention_fill=1.2,
    memory_bandwidth=0.8,
    kernel_latency=2.5e-6,
    intra_node=0.75,
    inter_node=0.75,
    cores=108,
)
OVERHEADS = Overheads(
    elementwise_traffic=1.0,
    score_bytes_moved=13.0,
    score_bytes_moved_backward=17.0,
    logit_bytes_moved=30.0,
    optimizer_bytes_moved=32.0,
    dispatch_bytes_moved=12.0,
    contention=0.15,
    fsdp_contention=0.38,
    collective_latency=20e-6,
    launch_overhead=40e-6,
    tp_overlap=0.6,
    spread=0.013,
    step_overhead=0.01,
)
CORES = {"A100": 108, "H100": 132, "B200": 148, "B300": 148, "Ascend-910B": 24, "MI3": 304, "TPU": 8}
ACHIEVABLE = {"A100": 271.2 / 312, "H100": 794.5 / 989, "GB200": 1745 / 2500, "B300": 1769 / 2250, "GB300": 1769 / 2500}
"""Best product of any shape over the bf16 peak (Bekman, "Machine learning engineering", accelerator chapter, 2025); the
GB200's and GB300's are the B200's and B300's, over their own peaks."""
ACHIEVABLE_FP8 = 1402.6 / 1979
"""The same for fp8 on the H100."""
HOPPER_ATTENTION = (0.58, 0.50)
"""Of cuDNN on its bf16 peak, forward and backward (Shah et al., "FlashAttention-3", 2024, figures 5 and 6)."""
SPRING = 0.02
"""Error that a constant must save to be moved by a factor e from its start."""
ROUNDS = 7
FEW_ROWS = 20
"""Below so many rows the error is the root of the mean square, see `run_error`."""
Error = Callable[[dict[str, float]], float]


@dataclass(frozen=True)
class Operator:
    """A measured operator."""

    chip: str
    kind: str
    efficiency: float
    row: dict[str, str]


def operators() -> list[Operator]:
    with (DATA_DIR / "operators.csv").open(encoding="utf-8", newline="") as file:
        return [Operator(row["chip"], row["op"], float(row["efficiency"]), row) for row in csv.DictReader(file)]


def operator_error(chip: ChipEfficiency, device: DeviceModel, rows: Sequence[Operator]) -> float:
    """Mean absolute error of the logarithm of the time of operators."""
    device = replace(device, efficiency=chip)
    return sum(abs(log(_seconds(device, item) / _measured(device, item))) for item in rows) / len(rows)


def _sizes(item: Operator) -> tuple[int, int, int, int]:
    return tuple(int(item.row[name]) for name in ("batch", "m", "n", "k"))  # type: ignore[return-value]


def _measured(device: DeviceModel, item: Operator) -> float:
    if item.kind in ("matmul", "group_matmul"):
        groups, m, n, k = _sizes(item)
        return 2.0 * groups * m * n * k / (device.peak * item.efficiency)
    row = item.row
    head = int(row["head"]) + int(row["value_head"])
    flops = 2.0 * int(row["batch"]) * int(row["heads"]) * int(row["length"]) ** 2 * head
    return flops * (2.5 if item.kind == "sdp_bwd" else 1.0) / (device.peak * item.efficiency)


def _seconds(device: DeviceModel, item: Operator) -> float:
    if item.kind in ("matmul", "group_matmul"):
        groups, m, n, k = _sizes(item)
        if item.row["layout"] == "bwd_grad_w":
            m, k = k, m
        if item.row["layout"] == "bwd_grad_act":
            n, k = k, n
        return matmul_time(device, m, n, k, groups=groups, weight_gradient=item.row["layout"] in ("NT", "bwd_grad_w"))
    row = item.row
    head, length = (int(row["head"]) + int(row["value_head"])) / 2, int(row["length"])
    backward = item.kind == "sdp_bwd"
    return flash_attention_time(device, int(row["batch"]), int(row["heads"]), length, length, head, backward=backward)


def run_error(constants: Calibration, rows: Sequence[PublishedRun]) -> float:
    """Mean absolute error of the logarithm of the time of steps; of few rows, the root of the mean square.

    The absolute error of fifteen rows is that of their median row, which several constants can reach in many ways.
    """
    errors = [log(run.predict(constants).seconds / run.seconds) for run in rows if run.seconds]
    if len(errors) < FEW_ROWS:
        return sqrt(sum(error**2 for error in errors) / len(errors))
    return sum(abs(error) for error in errors) / len(errors)


def descend(start: dict[str, float], error: Error, tick: Callable[[], None]) -> dict[str, float]:
    """Constants, each moved by factors while that lowers the error; fractions stay below 1."""
    found, step = dict(start), 0.25

    def penalised(values: dict[str, float]) -> float:
        return error(values) + SPRING * sum(abs(log(values[name] / start[name])) for name in start) / len(start)

    best = penalised(found)
    for _ in range(ROUNDS):
        for name in start:
            for factor in (1 + step, 1 / (1 + step)):
                moved = False
                while True:
                    tried = {**found, name: found[name] * factor}
                    if name in FRACTIONS and tried[name] > 0.98:
                        break
                    value = penalised(tried)
                    if value > best - 1e-6:
                        break
                    found, best, moved = tried, value, True
                if moved:
                    break
            tick()
        step *= 0.6
    return found


FRACTIONS = {
    "matmul",
    "weight_gradient",
    "grouped_gemm",
    "wave_quantization",
    "intra_node",
    "inter_node",
    "memory_bandwidth",
    "fsdp_contention",
    "attention_forward",
}
FRACTIONS |= {"attention_backward", "fp8"}
ON_OPERATORS = (
    "matmul",
    "weight_gradient",
    "wave_quantization",
    "half_speed_k",
    "attention_forward",
    "attention_backward",
    "attention_fill",
)


@dataclass(frozen=True)
class Stage:
    """Some constants, fitted together on some rows."""

    chip: str
    constants: tuple[str, ...]
    overheads: tuple[str, ...]
    rows: tuple[PublishedRun, ...]


def stages() -> Iterator[Stage]:
    """What is fitted on what, in order: later stages keep what earlier ones found."""
    every = [run for run in load_runs() if run.is_fit_set]

    def of(chip: str, *sets: str) -> tuple[PublishedRun, ...]:
        return tuple(run for run in every if run.set in sets and chip in run.cluster.chip.name)

    yield Stage(
        "A100",
        ("matmul", "wave_quantization", "half_speed_k", "attention_forward", "attention_backward", "intra_node"),
        (
            "elementwise_traffic",
            "score_bytes_moved",
            "score_bytes_moved_backward",
            "logit_bytes_moved",
            "optimizer_bytes_moved",
            "fsdp_contention",
            "launch_overhead",
            "step_overhead",
            "collective_latency",
        ),
        of("A100", "fit-foundry", "fit-one-node"),
    )
    yield Stage("H100", ("matmul", "attention_forward", "attention_backward", "fp8"), (), of("H100", "fit-foundry"))
    yield Stage("B200", ("matmul", "intra_node", "grouped_gemm"), ("dispatch_bytes_moved",), of("B200", "fit-simumax"))
    yield Stage("Ascend-910B", ("matmul", "grouped_gemm", "intra_node"), (), of("Ascend", "fit-ascend"))
    yield Stage("MI3", ("matmul",), (), of("MI3", "fit-amd"))
    yield Stage("TPU-v5e", ("matmul",), (), of("TPU-v5e", "fit-maxtext"))
    yield Stage("TPU-v5p", ("matmul",), (), of("TPU-v5p", "fit-maxtext"))


def on_operators(progress: Progress) -> dict[str, ChipEfficiency]:
    """Shape-dependence of products and attention, from operators measured by themselves."""
    found = {}
    for name, chip, peak, bandwidth in (
        ("A100", "A100-PCIe-80GB", 312e12, 1935e9),
        ("B200", "B200", 2250e12, 8000e9),
    ):
        rows = [item for item in operators() if item.chip == chip and item.kind != "group_matmul"]
        grouped = [item for item in operators() if item.chip == chip and item.kind == "group_matmul"]
        base = replace(START, cores=CORES[name])
        device = DeviceModel(peak, peak, bandwidth, 2, base)
        task = progress.add_task(f"{name}: {len(rows)} operators", total=ROUNDS * (len(ON_OPERATORS) + 1))

        def tick(task: int = task) -> None:
            progress.advance(task)  # type: ignore[arg-type]

        values = descend(
            {key: getattr(base, key) for key in ON_OPERATORS},
            lambda values, base=base, device=device, rows=rows: operator_error(replace(base, **values), device, rows),
            tick,
        )
        base = replace(base, **values)
        values = descend(
            {"grouped_gemm": base.grouped_gemm},
            lambda values, base=base, device=device, rows=grouped: operator_error(
                replace(base, **values), device, rows
            ),
            tick,
        )
        found[name] = replace(base, **values, measured_on="operators")
    return found


def fit() -> Calibration:
    """Everything, in order."""
    with Progress() as progress:
        chips = on_operators(progress)
        chips["H100"] = replace(chips["A100"], cores=CORES["H100"], measured_on="")
        constants = Calibration(chips=chips, overheads=OVERHEADS, default=replace(chips["A100"], measured_on=""))
        for stage in stages():
            constants = _fit(constants, stage, progress)
        chips = dict(constants.chips)
        chips |= _unfitted(chips)
        return replace(constants, chips=chips, default=replace(chips["A100"], measured_on="as A100"))


def _unfitted(chips: dict[str, ChipEfficiency]) -> dict[str, ChipEfficiency]:
    """Chips with libraries of their own that no row to fit on has: what others measured on them alone stands in.

    Training gets of the best product what it gets of it on the A100.
    """
    sustained, found = chips["A100"].matmul / ACHIEVABLE["A100"], {}
    for name in ("H100", "GB200", "B300", "GB300"):
        native = replace(
            chips["H100" if name == "H100" else "B200"],
            matmul=ACHIEVABLE[name] * sustained,
            fp8=ACHIEVABLE_FP8 / ACHIEVABLE["H100"],
            measured_on="microbenchmarks of others",
        )
        if name == "H100":
            forward, backward = HOPPER_ATTENTION
            found[name + VENDOR_SUFFIX] = replace(native, attention_forward=forward, attention_backward=backward)
        else:
            found[name] = native
    return found


def _fit(constants: Calibration, stage: Stage, progress: Progress) -> Calibration:
    chip = constants.chips.get(stage.chip) or replace(
        constants.chips["A100"],
        cores=CORES[stage.chip.split("-v")[0]],
        matmul=START.matmul,
        attention_forward=START.attention_forward,
        attention_backward=START.attention_backward,
    )
    names = [*stage.constants, *stage.overheads]
    task = progress.add_task(f"{stage.chip}: {len(stage.rows)} runs", total=ROUNDS * len(names))
    alone = stage.chip not in ("A100", "H100", "B200")

    def made(values: dict[str, float]) -> Calibration:
        moved = {key: values[key] for key in stage.constants}
        if alone:  # one figure a chip: attention moves with products
            share = values["matmul"] / chip.matmul
            moved |= {key: getattr(chip, key) * share for key in ("attention_forward", "attention_backward")}
        entry = replace(chip, **moved, measured_on=", ".join(sorted({run.set for run in stage.rows})))
        overheads = replace(constants.overheads, **{key: values[key] for key in stage.overheads})
        return replace(constants, chips={**constants.chips, stage.chip: entry}, overheads=overheads)

    start = {key: getattr(chip, key) for key in stage.constants}
    start |= {key: getattr(constants.overheads, key) for key in stage.overheads}
    best = descend(start, lambda values: run_error(made(values), stage.rows), lambda: progress.advance(task))
    return made(best)


def written(constants: Calibration, path: Path = CALIBRATION_FILE) -> None:
    def rounded(entry: dict[str, object]) -> dict[str, object]:
        return {key: float(f"{value:.4g}") if isinstance(value, float) else value for key, value in entry.items()}

    default = rounded(asdict(constants.default))
    chips = {name: rounded(asdict(entry)) for name, entry in constants.chips.items()}
    table = {"overheads": rounded(asdict(constants.overheads)), "default": default, "chips": chips}
    assert {field.name for field in fields(ChipEfficiency)} == set(default)
    sets = "the sets `fit-…` of benchmarks/validation/published"
    text = f"# Written by benchmarks/fit_cost.py from {sets}; see docs/planner-truth.md.\n\n"
    path.write_text(text + tomli_w.dumps(table), encoding="utf-8")


if __name__ == "__main__":
    written(fit())
