"""How a run is laid out: degrees of every axis, their place on the network, pipeline, recompute, sharding."""

from itertools import pairwise
from typing import Literal

from pydantic import Field

from danlu.spec.description import Bytes, Count, Description, Many, Seconds

Axis = Literal["pp", "replicate", "shard", "cp", "tp", "ep"]
DENSE_AXES: tuple[Axis, ...] = ("pp", "replicate", "shard", "cp", "tp")
"""Axes of the mesh that attention and dense layers use, outermost first."""

Schedule = Literal["gpipe", "1f1b", "interleaved", "zero-bubble", "zbv"]
LOOPED_SCHEDULES: tuple[Schedule, ...] = ("interleaved", "zero-bubble", "zbv")
"""Schedules that give every rank several stages."""
SPLIT_SCHEDULES: tuple[Schedule, ...] = ("zero-bubble", "zbv")
"""Schedules that take the backward pass in two halves, first for inputs, later for weights.

The half for weights finds them only where they stayed gathered since the forward pass (resharded, PyTorch 2.13
drops their gradients without a word), and compiled blocks cannot be split.
"""


class Degrees(Description):
    """Ranks along every axis. `ep` folds the ranks of `shard × cp × tp` once more, for the expert layers."""

    pp: Count = 1
    """Pipeline stages' ranks."""
    replicate: Count = 1
    """Replicas of the sharded model (HSDP)."""
    shard: Count = 1
    """Ranks over which states are sharded (FSDP)."""
    cp: Count = 1
    """Ranks that share one sequence."""
    tp: Count = 1
    """Ranks that share every matrix, with sequence parallelism between them."""
    ep: Count = 1
    """Ranks over which experts are spread."""

    @property
    def world(self) -> int:
        """Ranks in the whole run."""
        return self.pp * self.stage

    @property
    def stage(self) -> int:
        """Ranks that hold one pipeline stage."""
        return self.replicate * self.shard * self.cp * self.tp

    @property
    def data(self) -> int:
        """Ranks that read different sequences."""
        return self.replicate * self.shard

    @property
    def expert_shard(self) -> int:
        """Ranks over which one expert's states are sharded."""
        return self.shard * self.cp * self.tp // self.ep


class Pipeline(Description):
    """The pipeline schedule; only read when `degrees.pp` is above 1."""

    schedule: Schedule = "1f1b"
    stages_per_rank: Count = 1
    """Virtual stages on every rank; the looped schedules want 2 or more, the others 1."""
    layers: Many[int] = ()
    """Layers of every stage, in order of the stages; as even as possible when left out."""


class Prediction(Description):
    """What a plan was predicted to do; nothing is built from it, reports show it beside what was measured."""

    seconds: Seconds
    """Of one step."""
    tokens_per_second: float = Field(gt=0)
    """Of the whole run while nothing breaks."""
    bytes: Bytes
    """Of the fullest chip."""
    model_flops_share: float = Field(gt=0)
    """Of the chips' peak that goes into model FLOPs (MFU)."""
    effective_share: float | None = Field(default=None, gt=0, le=1)
    """Of the time that counts beside failures and saves."""
    cluster: str
    """Name of the machine it was predicted for."""
    by: str
    """Who predicted it."""


class Plan(Description):
    """How it will run. Made by hand or by the planner, read by every room that builds a part of the run."""

    degrees: Degrees = Degrees()
    mapping: dict[Axis, dict[str, Count]] = Field(default_factory=dict)
    """For an axis, how many of its ranks lie on each network level: `tp = {node = 8}`.

    Axes left out fill what remains, tensor parallelism innermost and the pipeline outermost.
    """
    microbatches: Count = 1
    """Pieces in which a rank takes its share of the batch: gradient accumulation, and what fills the pipeline."""
    pipeline: Pipeline = Pipeline()
    recompute: Literal["none", "selective", "full"] = "none"
    """Activations to compute again in the backward pass: none; all but matrix products and attention; all."""
    compile: bool = False
    """Compile every block with torch.compile."""
    reshard_after_forward: bool | None = None
    """Free the gathered parameters between forward and backward (ZeRO-3), or keep them (ZeRO-2).

    When left out: free them, except in a pipeline, where every microbatch would gather them again.
    """

    prediction: Prediction | None = None
    """Time and bytes, where a planner made the plan."""

    @property
    def reshards(self) -> bool:
        """Whether gathered parameters are freed after the forward pass, with the default filled in."""
        return self.degrees.pp == 1 if self.reshard_after_forward is None else self.reshard_after_forward

    @property
    def stages(self) -> int:
        """Pipeline stages, virtual ones included."""
        return self.degrees.pp * self.pipeline.stages_per_rank

    def stage_layers(self, layers: int) -> tuple[range, ...]:
        """Which of `layers` layers every stage holds: as the plan says, or as even as possible.

        Where they do not divide, the stages in the middle take the extra layers: the first also
        holds the embedding and the last the head.
        """
        counts = list(self.pipeline.layers)
        if not counts:
            counts = list(evenly(layers, self.stages))
        starts = [sum(counts[:stage]) for stage in range(len(counts) + 1)]
        return tuple(range(start, end) for start, end in pairwise(starts))


def evenly(layers: int, stages: int) -> tuple[int, ...]:
    """Layers of every stage, as even as possible; those in the middle take what is left over."""
    base, extra = divmod(layers, stages)
    first = (stages - extra) // 2
    return tuple(base + (first <= stage < first + extra) for stage in range(stages))


def fully_sharded(world: int) -> Plan:
    """The layout of a run without a plan: states sharded over all ranks."""
    return Plan(degrees=Degrees(shard=world))
