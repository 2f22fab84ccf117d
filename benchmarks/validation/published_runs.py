"""The published runs: what `validate.py` predicts, and what was measured."""

import csv
import tomllib
from dataclasses import dataclass
from functools import cache
from math import ceil, inf
from pathlib import Path
from typing import Any, Literal

from danlu.cost.calibration import Calibration
from danlu.cost.parallel_layout import ParallelLayout
from danlu.cost.software import HSDP, REPLICATED, ZERO_1, ZERO_2, ZERO_3, Sharding, Software
from danlu.cost.step_prediction import Predictor, StepPrediction
from danlu.spec.cluster import Chip, Cluster, NetworkLevel
from danlu.spec.model import MLAConfig, Model, Moe
from danlu.spec.recipe import BatchConfig

DATA_DIR = Path(__file__).parent / "published"
_SHARDING: dict[str, Sharding] = {"none": REPLICATED, "optimizer": ZERO_1, "gradients": ZERO_2, "parameters": ZERO_3}
_BUCKET = 5e8
"""Elements per bucket that DeepSpeed reduces or gathers by default: gradients as stored, parameters in half."""
_LOGIT_BYTES = {"fused": 6.0, "fsdp": 14.0}
"""Bytes per logit at the loss: a fused kernel, PyTorch's own; Megatron's and others reuse their fp32 copy in place."""
_MLA_FIELDS = ("q_lora_rank", "kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
"""In the order of the column `latent`."""
_INNER_LATENCY = 2e-6
"""Seconds of one round inside a node; the order of magnitude that is reported for NVLink."""
_OUTER_LATENCY = 6e-6


@dataclass(frozen=True, kw_only=True)
class PublishedRun:
    """One published run."""

    id: str
    set: str
    source: str
    group: str
    """Runs of one group differ only in their layout: the same model, chips and batch."""
    model: Model
    layout: ParallelLayout
    batch: BatchConfig
    cluster: Cluster
    software: Software
    dtype: str
    seconds: float | None
    """Measured; none where memory ran out."""
    memory: float | None
    """Bytes measured at the peak."""
    memory_kind: str
    """What was measured: tensors (allocated), the allocator (reserved), or everything on the device (device)."""
    assumed: str
    variant: str
    """Release of the software, or state of the machine, if the source distinguishes several."""

    @property
    def is_fit_set(self) -> bool:
        """Whether constants may be fitted on it."""
        return self.set.startswith("fit-")

    @property
    def out_of_memory(self) -> bool:
        """Whether the run did not fit."""
        return self.seconds is None

    def predict(self, constants: Calibration | None = None) -> StepPrediction:
        """Predict the run."""
        predictor = Predictor(self.model, self.batch, self.cluster, self.software, self.dtype, constants)
        return predictor.predict(self.layout)


TableVersion = Literal["now", "first values", "first columns"]
"""Held-out runs as they are in the table; with their first committed values, in the columns of that time; and with all
columns that were added since left empty."""


@cache
def load_runs(described: TableVersion = "now") -> tuple[PublishedRun, ...]:
    """Every published run, in the order of the table."""
    chips = _chips()
    return tuple(_run(row, chips) for row in _rows(described))


@cache
def load_held_out() -> tuple[PublishedRun, ...]:
    """Runs that were described and committed before any of them was predicted."""
    with (DATA_DIR / "held_out.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    chips = _chips()
    return tuple(_run(row, chips) for row in rows)


@cache
def load_one_node() -> tuple[PublishedRun, ...]:
    """All 1,440 layouts of one node that vTrain measured, of which `runs.csv` describes every sixth in full."""
    like = next(row for row in _rows("now") if row["set"] == "vtrain-one-node")
    with (DATA_DIR / "one_node.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    chips = _chips()
    return tuple(
        _run({**like, **row, "id": f"o{number:04}", "mlp": str(4 * int(row["width"]))}, chips)
        for number, row in enumerate(rows)
    )


@cache
def _chips() -> dict[str, dict[str, Any]]:
    with (DATA_DIR / "chips.toml").open("rb") as file:
        return tomllib.load(file)


def _rows(described: TableVersion) -> list[dict[str, str]]:
    with (DATA_DIR / "runs.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    if described == "now":
        return rows
    values, added = original_values()
    empty = dict.fromkeys(added if described == "first columns" else (), "")
    return [row if row["set"].startswith("fit-") else row | values.get(row["id"], {}) | empty for row in rows]


@cache
def original_values() -> tuple[dict[str, dict[str, str]], tuple[str, ...]]:
    """First values of held-out rows where they differ, and the columns added since."""
    values: dict[str, dict[str, str]] = {}
    with (DATA_DIR / "first_described.csv").open(encoding="utf-8", newline="") as file:
        for change in csv.DictReader(file):
            values.setdefault(change["id"], {})[change["column"]] = change["first"]
    added = tuple(values.pop("*"))
    return values, added


def _run(row: dict[str, str], chips: dict[str, dict[str, Any]]) -> PublishedRun:
    number = {key: int(row[key]) for key in ("tp", "pp", "vpp", "dp", "ep", "etp", "cp", "microbatch", "sequences")}
    model, cluster = _model(row), _cluster(row, chips[row["chip"]])
    slices = 1
    sharding = _SHARDING[row["sharding"]]
    node = int(row["node"])
    if sharding is ZERO_3 and node > 8 and int(row["chips"]) > node:
        slices, sharding = int(row["chips"]) // node, HSDP  # sharded inside a slice, replicated across
    layout = ParallelLayout(
        pp=number["pp"],
        replicate=slices,
        shard=number["dp"] // slices,
        cp=number["cp"],
        tp=number["tp"],
        ep=number["ep"],
        microbatches=number["sequences"] // (number["dp"] * number["microbatch"]),
        schedule="interleaved" if number["vpp"] > 1 else "1f1b",
        stages_per_rank=number["vpp"],
        stage_layers=_stage_layers(row, number["pp"]),
        reshard_after_forward=sharding is ZERO_3 or sharding is HSDP,
    )
    hidden = row["overlap"].split()
    gradient = int(row["gradients"] or (2 if row["dtype"] == "fp16" else 4))
    kernels = row["kernels"].split()
    window, _, share = row["window"].partition("/")
    software = Software(
        sharding=sharding,
        attention=row["attention"],  # type: ignore[arg-type]
        sequence_parallel=row["sp"] == "1",
        recompute=row["recompute"],  # type: ignore[arg-type]
        recomputed_layers=int(row["recomputed_layers"]) if row["recomputed_layers"] else None,
        recompute_stops_early=row["engine"] in ("fsdp", "xla"),
        expert_tp=number["etp"] if row["experts"] else 1,
        overlap_grad_reduce="dp" in hidden,
        overlap_tp_comm="tp" in hidden,
        overlap_ep_comm="ep" in hidden,
        compiled_gathers=row["engine"] == "xla",
        overlap_p2p_comm="none" not in hidden,
        dedup_dispatch=row["dispatch"] == "once",
        fused_grouped_gemm="experts" in kernels,
        fp8_attention="attention" in kernels,
        graph_capture=row["launches"] == "graphed",
        mtp_layers=int(row["ahead"] or 0),
        gradient_bytes=gradient,
        count_embedding_and_head=row["embedding_slots"] == "1",
        reduce_every_microbatch=row["engine"] in ("fsdp", "xla"),
        unfused_grad_accumulation=row["engine"] == "deepspeed",
        serial_p2p=row["engine"] == "deepspeed",
        all_reduce_gradients=row["engine"] == "deepspeed" and row["dtype"] == "bf16",  # as its bf16 optimizer does
        extra_process_groups=4 if row["engine"] == "deepspeed" else 0,  # its pipeline creates its own beside Megatron's
        init_unsharded=row["built"] == "whole",
        keep_half_parameters=row["engine"] not in ("fsdp", "xla"),
        bucket_bytes=_BUCKET * (gradient + 2) if row["engine"] == "deepspeed" and row["sharding"] != "none" else 0.0,
        logit_bytes=_LOGIT_BYTES.get(row["loss"] or row["engine"], 10.0),
        launch_blocking=row["launches"] == "blocking",
        ring_bandwidth=float(row["ring_GBps"]) * 1e9 if row["ring_GBps"] else inf,
        sliding_window=int(window) if window else 0,
        sliding_window_fraction=float(share) if share else 0.0,
    )
    return PublishedRun(
        id=row["id"],
        set=row["set"],
        source=row["source"],
        group=_group(row),
        model=model,
        layout=layout,
        batch=BatchConfig(sequences=number["sequences"], length=int(row["length"])),
        cluster=cluster,
        software=software,
        dtype=row["dtype"],
        seconds=float(row["step_s"]) if row["status"] == "ok" else None,
        memory=float(row["memory_GB"]) * 1e9 if row["memory_GB"] else None,
        memory_kind=row["memory_kind"],
        assumed=row["assumed"],
        variant=row["variant"],
    )


def _stage_layers(row: dict[str, str], pp: int) -> tuple[int, ...]:
    """Layers of every stage in a row, `4*15 1` for fifteen stages of four and one of one; empty: even.

    Layers that predict tokens ahead (MTP) come last. DeepSpeed fills stage after stage: 78 layers over 12
    stages are eleven times 7 and 1 (BigScience's chronicle).
    """
    parts = [part.partition("*") for part in row["stages"].split()]
    found = [int(count) for count, _, times in parts for _ in range(int(times or 1))]
    if found:
        found[-1] += int(row["ahead"] or 0)
    layers = int(row["layers"])
    if row["engine"] == "deepspeed" and not row["embedding_slots"] and layers % pp:
        full = ceil(layers / pp)
        found = [max(0, min(full, layers - stage * full)) for stage in range(pp)]
    return tuple(found)


def _group(row: dict[str, str]) -> str:
    """Key that is equal for runs that differ only in their layout."""
    model = f"{row['model']} ({row['layers']} × {row['width']}, {row['heads']} heads)"
    kind = ", ".join(part for part in (row["dtype"], row["variant"]) if part)
    return f"{row['set']}: {model}, {row['chips']} × {row['chip']}, {row['sequences']} × {row['length']}, {kind}"


def _model(row: dict[str, str]) -> Model:
    moe = None
    if row["experts"]:
        width = int(row["moe_width"])
        moe = Moe(
            experts=int(row["experts"]),
            top_k=int(row["top_k"]),
            width=width,
            shared=int(row["shared_width"] or 0) // width,
            dense_layers=int(row["dense_layers"] or 0),
        )
    parts = (int(part) for part in row["latent"].split("/")) if row["latent"] else None
    latent = MLAConfig(**dict(zip(_MLA_FIELDS, parts, strict=True))) if parts else None
    return Model(
        name=row["model"],
        vocabulary=int(row["vocabulary"]),
        layers=int(row["layers"]) + int(row["ahead"] or 0),
        width=int(row["width"]),
        heads=int(row["heads"]),
        kv_heads=None if latent else int(row["kv_heads"]),
        head_width=None if latent else int(row["head_width"] or int(row["width"]) // int(row["heads"])),
        mlp_width=int(row["mlp"]) if row["mlp"] else None,
        sequence=int(row["length"]),
        activation=row["activation"],  # type: ignore[arg-type]
        position="learned" if row["activation"] == "gelu" else "rope",
        tied=row["tied"] == "1",
        mla=latent,
        moe=moe,
    )


def _cluster(row: dict[str, str], sheet: dict[str, Any]) -> Cluster:
    chips, node = int(row["chips"]), int(row["node"])
    chip = Chip(
        name=row["chip"],
        kind="cpu",
        memory=int(sheet["memory"]),
        memory_bandwidth=sheet["bandwidth"],
        peak=sheet["peak"],
    )
    levels = [_level("node", node, float(row["inner_GBps"]), _INNER_LATENCY)]
    levels.append(_level("fabric", max(1, ceil(chips / node)), float(row["outer_GBps"]), _OUTER_LATENCY))
    return Cluster(name=f"{chips} × {row['chip']}", chip=chip, levels=tuple(levels))


def _level(name: str, fanout: int, gigabytes: float, latency: float) -> NetworkLevel:
    return NetworkLevel(name=name, fanout=fanout, bandwidth=gigabytes * 1e9, latency=latency)
