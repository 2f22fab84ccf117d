"""How a run is laid out: degrees of every axis, their placement on the network, pipeline, recompute, sharding."""

from itertools import pairwise
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from danlu.spec.cluster import MAX_CHIPS
from danlu.spec.description import SpecModel, TupleOf
from danlu.spec.names import Label
from danlu.spec.operator_table import RoutedOperator
from danlu.spec.quantity import Bytes, Seconds
from danlu.spec.recompute import Recompute, RecomputeLayers, RecomputeMode

Axis = Literal["pp", "replicate", "shard", "cp", "tp", "ep"]
DENSE_AXES: tuple[Axis, ...] = ("pp", "replicate", "shard", "cp", "tp")
"""Axes of the mesh that attention and dense layers use, outermost first."""

PipelineSchedule = Literal["gpipe", "1f1b", "interleaved", "zero-bubble", "zbv"]
LOOPED_SCHEDULES: tuple[PipelineSchedule, ...] = ("interleaved", "zero-bubble", "zbv")
"""Schedules that give every rank several stages."""
SPLIT_BACKWARD_SCHEDULES: tuple[PipelineSchedule, ...] = ("zero-bubble", "zbv")
"""Schedules that split the backward pass, first for inputs, later for weights.

The half for weights needs them gathered since the forward pass (if resharded, PyTorch 2.13 silently drops their
gradients), and compiled blocks cannot be split.
"""


ContextParallel = Literal["ulysses", "ring"]
TokenDispatcher = Literal["alltoall", "deduplicated"]
"""How the ranks of `cp` attend over a sequence that they share."""

Degree = Annotated[int, Field(ge=1, le=10**8)]


class Degrees(SpecModel):
    """Ranks along every axis. `ep` folds the ranks of `shard × cp × tp` again, for the expert layers."""

    pp: Degree = 1
    """Pipeline-parallel ranks."""
    replicate: Degree = 1
    """Replicas of the sharded model (HSDP)."""
    shard: Degree = 1
    """Ranks over which states are sharded (FSDP)."""
    cp: Degree = 1
    """Context-parallel ranks: they shard every sequence."""
    tp: Degree = 1
    """Tensor-parallel ranks: they shard every matrix, with sequence parallelism in between."""
    ep: Degree = 1
    """Expert-parallel ranks: experts are sharded over them."""

    @model_validator(mode="after")
    def _exists(self) -> Self:
        if self.world > MAX_CHIPS:
            raise ValueError(
                f"`pp` must give at most {MAX_CHIPS:,} ranks with the other degrees, but gives {self.world:.3g}\n"
                "smaller degrees"
            )
        return self

    @property
    def world(self) -> int:
        """Ranks of the run."""
        return self.pp * self.ranks_per_stage

    @property
    def ranks_per_stage(self) -> int:
        """Ranks that hold one pipeline stage."""
        return self.replicate * self.shard * self.cp * self.tp

    @property
    def dp(self) -> int:
        """Ranks that read different sequences."""
        return self.replicate * self.shard

    @property
    def expert_shard(self) -> int:
        """Ranks over which one expert's states are sharded."""
        return self.shard * self.cp * self.tp // self.ep


class PipelineConfig(SpecModel):
    """The pipeline schedule; only read when `degrees.pp` is above 1."""

    schedule: PipelineSchedule = "1f1b"
    """Order in which microbatches pass the stages."""
    stages_per_rank: int = Field(default=1, ge=1, le=1000)
    """Virtual stages per rank; the looped schedules need 2 or more, the others 1."""
    layers: TupleOf[Annotated[int, Field(le=100_000)]] = Field(default=(), max_length=100_000)
    """Layers of every stage, in order of the stages; as even as possible if omitted."""


class PlanPrediction(SpecModel):
    """The prediction for a plan; not used to build anything, reports show it beside what was measured."""

    seconds: Seconds
    """Of one step."""
    tokens_per_second: float = Field(gt=0, allow_inf_nan=False)
    """Of all ranks, without failures."""
    bytes: Bytes
    """Of the fullest chip."""
    model_flops_share: float = Field(gt=0, allow_inf_nan=False)
    """Model FLOPs per second over the peak of the chips (MFU)."""
    dtype: str = ""
    """Precision of compute of the prediction."""
    effective_share: float | None = Field(default=None, gt=0, le=1)
    """Goodput: share of time spent on useful training, without failures and saves."""
    cluster: Label
    """Name of the cluster it was predicted for."""
    by: Label
    """What predicted it."""


class Plan(SpecModel):
    """How a run is laid out. Written by hand or by the planner, read by every room that builds the run."""

    degrees: Degrees = Degrees()
    """Ranks along every axis of the mesh; their product is the number of processes."""
    mapping: dict[Axis, dict[str, Degree]] = Field(default_factory=dict)
    """For an axis, how many of its ranks lie on each network level: `tp = {node = 8}`.

    Omitted axes fill the remaining ranks, tensor parallelism innermost and the pipeline outermost.
    """
    microbatches: int = Field(default=1, ge=1, le=10**6)
    """Microbatches of a rank's share of the batch: gradient accumulation, and what fills the pipeline."""
    pipeline: PipelineConfig = PipelineConfig()
    """Schedule and stages, if `degrees.pp` is above 1."""
    context_parallel: ContextParallel = "ulysses"
    """How the ranks of `degrees.cp` attend over a sequence.

    `ulysses`: all-to-alls exchange heads for positions, so `cp` is limited by the heads. `ring`: keys and values travel
    from rank to rank while attention computes, whatever the heads; each rank holds two pieces of a sequence, one from
    either half, so that all have the same work under the causal mask.
    """
    token_dispatcher: TokenDispatcher = "alltoall"
    """How tokens reach the experts of `degrees.ep`.

    `alltoall`: a copy for each chosen expert, in one all-to-all. `deduplicated`: once to every part of the network that
    holds one of its experts, level by level from the outermost, and the answers are summed on the way back; sums are
    then taken in another order.
    """
    dispatch_chunks: int = Field(default=1, ge=1, le=64)
    """Parts in which a layer's tokens go through the experts of `degrees.ep`.

    While one part is computed, the next is on its way to its experts, and the answers to the one before on their way
    back; only of the first and the last part a way is waited for. Deduplicated tokens are under way so over the
    outermost level alone, and pass those inside it with the part that is computed.
    """
    recompute: Recompute = "none"
    """Activations to recompute in the backward pass: none; all but matmuls and attention; all.

    Or by layer, `{full = "0-15", selective = "16, 20-23"}`: layers that are not named recompute nothing.
    """
    operators: dict[RoutedOperator, Label] = Field(default_factory=dict)
    """Which implementation of an operator runs, such as `{rms_norm = "torch"}`: `danlu ops` lists them, and `danlu ops
    tune` measures which is fastest. Omitted operators run the one that was made for the chip."""
    compile: bool = False
    """Compile every block with torch.compile."""
    check_compiled: bool = True
    """Compare compiled blocks with eager ones in their first call, results and gradients; a kind of block that differs
    runs eagerly, with a warning. Takes about a second per kind."""
    reshard_after_forward: bool | None = None
    """Free the gathered parameters between forward and backward (ZeRO-3), or keep them (ZeRO-2).

    If omitted: free them, except in a pipeline, where every microbatch would gather them again.
    """
    reduce_gradients: Literal["microbatch", "step"] | None = None
    """When gradients are reduced over the ranks that parameters are sharded over.

    After every `microbatch`, so that only shards of them are kept. Or once per `step`: a rank keeps whole gradients in
    between, and sends as much less as there are microbatches; with `reshard_after_forward = false` parameters are
    gathered once per step, too (ZeRO-1). If omitted: after every microbatch, but in a pipeline once per step.
    """
    shard_optimizer_over_replicas: bool = False
    """Shard the optimizer's moments over the ranks of `degrees.replicate` too, which gather what each has updated.

    Parameters and gradients stay within their group of `degrees.shard` ranks; of moments a rank keeps what it would if
    all ranks were one group.
    """
    loss_chunks: int = Field(default=1, ge=1, le=1024)
    """Parts of the vocabulary whose logits are computed one after another, and again in the backward pass.

    Above 1, logits and their gradients take so many times less memory, and the head a third more time.
    """
    regather_inputs: bool = False
    """Free what `tp` gathered for a layer's matrices after the forward pass, and gather it again in the backward pass.

    Of layers that recompute nothing: recompute gathers again in any case.
    """

    prediction: PlanPrediction | None = None
    """Predicted time and memory, if the planner made the plan."""

    @property
    def resolved_reshard_after_forward(self) -> bool:
        """Whether gathered parameters are freed after the forward pass, with the default filled in."""
        return self.degrees.pp == 1 if self.reshard_after_forward is None else self.reshard_after_forward

    @property
    def reduces_once_per_step(self) -> bool:
        """Whether gradients are kept whole until the last microbatch, with the default filled in."""
        return self.degrees.pp > 1 if self.reduce_gradients is None else self.reduce_gradients == "step"

    def recompute_modes(self, layers: int) -> tuple[RecomputeMode, ...]:
        """The recompute mode of every layer."""
        recompute = self.recompute
        return recompute.modes(layers) if isinstance(recompute, RecomputeLayers) else (recompute,) * layers

    def regathered_layers(self, layers: int) -> frozenset[int]:
        """The layers whose gathered inputs are freed after the forward pass, though the layer is not recomputed."""
        if not self.regather_inputs or self.degrees.tp == 1:
            return frozenset()
        return frozenset(layer for layer, mode in enumerate(self.recompute_modes(layers)) if mode == "none")

    @property
    def num_stages(self) -> int:
        """Pipeline stages, virtual ones included."""
        return self.degrees.pp * self.pipeline.stages_per_rank

    def stages_of_rank(self, pp_rank: int) -> list[int]:
        """The stages of pipeline rank `pp_rank`."""
        return stages_of_rank(
            pp_rank, self.degrees.pp, self.pipeline.stages_per_rank, zigzag=self.pipeline.schedule == "zbv"
        )

    def rank_of_stage(self, stage: int) -> int:
        """The pipeline rank that holds a stage."""
        turn, position = divmod(stage, self.degrees.pp)
        return self.stages_of_rank(position)[turn] % self.degrees.pp  # a zigzag is its own inverse

    def stage_layers(self, layers: int) -> tuple[range, ...]:
        """Which of `layers` layers every stage holds: as the plan says, or as even as possible.

        If they do not divide, the middle stages take the extra layers: the first also holds the embedding and the
        last the head.
        """
        counts = list(self.pipeline.layers)
        if not counts:
            counts = list(split_layers_evenly(layers, self.num_stages))
        starts = [sum(counts[:stage]) for stage in range(len(counts) + 1)]
        return tuple(range(start, end) for start, end in pairwise(starts))


def stages_of_rank(pp_rank: int, pp: int, stages_per_rank: int, *, zigzag: bool) -> list[int]:
    """The stages of one of `pp` pipeline ranks: round-robin, or with `zigzag` down and up again (`zbv`)."""
    return [turn * pp + (pp - 1 - pp_rank if zigzag and turn % 2 else pp_rank) for turn in range(stages_per_rank)]


def split_layers_evenly(layers: int, stages: int) -> tuple[int, ...]:
    """Layers of every stage, as even as possible; the middle ones take the remainder."""
    base, extra = divmod(layers, stages)
    first = (stages - extra) // 2
    return tuple(base + (first <= stage < first + extra) for stage in range(stages))


def fully_sharded_plan(world: int) -> Plan:
    """The layout of a run without a plan: states sharded over all ranks."""
    return Plan(degrees=Degrees(shard=world))
