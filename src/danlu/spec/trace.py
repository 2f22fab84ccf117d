"""What ranks do in one optimiser step, as a dry run finds it: operators, collectives, and the bytes they hold."""

from typing import Literal, get_args

from pydantic import Field

from danlu.spec.description import Bytes, Count, Description, Many

Phase = Literal["forward", "recompute", "backward", "optimiser"]
Kind = Literal["parameters", "gathered", "gradients", "optimiser", "activations", "communication"]
KINDS: tuple[Kind, ...] = get_args(Kind)
"""What a byte is for: this rank's shard of the parameters, parameters gathered for use, gradients, optimiser states,
activations (and what operators need in between), buffers of collectives."""


class Collective(Description):
    """Calls of one collective that are alike."""

    operation: str
    dtype: str
    size: Bytes
    """Bytes the rank puts into one call."""
    axes: str
    """Axes of the mesh its group lies along."""
    ranks: Count
    level: str = ""
    """Innermost level of the network that joins the group; empty without a cluster."""
    count: Count

    @property
    def total(self) -> int:
        """Bytes of all calls."""
        return self.size * self.count


class Operator(Description):
    """Calls of one operator that are alike."""

    name: str
    """Such as `aten.mm`."""
    phase: Phase
    module: str
    """The innermost module that called it, layers that are alike under one name: `blocks.*.attention.q`."""
    inputs: Many[str]
    """Dtype and shape of every tensor that goes in: `bf16[4096, 8192]`."""
    outputs: Many[str]
    flops: float = Field(ge=0)
    """Of one call on this rank's part; 0 for what only moves bytes."""
    bytes: Bytes
    """Read and written by one call."""
    count: Count


class Instant(Description):
    """Bytes alive at one moment of the step, in the order of `KINDS`."""

    at: int = Field(ge=0)
    """Operators of the step that ran before."""
    phase: Phase
    module: str
    """The module at work, with its own layer number."""
    microbatch: int | None = None
    held: Many[int]

    @property
    def total(self) -> int:
        """Bytes alive."""
        return sum(self.held)


class Trace(Description):
    """One optimiser step of one rank."""

    rank: int = Field(ge=0)
    world: Count
    place: dict[str, int]
    """The rank's coordinate along every axis."""
    stands_for: Count
    """Ranks that do the same, this one included: those at the same place of the pipeline."""
    folded: int = Field(default=0, ge=0)
    """Layers that were not run but counted, because they are like their neighbours; 0 if all were run."""
    collectives: Many[Collective]
    operators: Many[Operator]
    memory: Many[Instant]
    """The step in a few hundred instants; between two of them no more is held than at the higher one."""
    peak: Instant
    """The moment at which most bytes are alive."""
    seconds: float = Field(ge=0)
    """How long the dry run of this rank took."""

    @property
    def flops(self) -> float:
        """FLOPs of the step on this rank, recompute included."""
        return sum(operator.flops * operator.count for operator in self.operators)


class DryRun(Description):
    """One step of a run, without its machines: what the ranks that differ do."""

    name: str
    """Of the recipe."""
    cluster: str = ""
    levels: Many[str] = ()
    """Levels of the cluster's network, innermost first."""
    memory_limit: Bytes | None = None
    """Memory of one chip, where a cluster was given."""
    degrees: dict[str, int]
    microbatches: Count
    schedule: Many[Many[str]] = ()
    """For every place on the pipeline its actions in order: `F0.3` is the forward of stage 0 for microbatch 3, `B` a
    whole backward, `I` and `W` its halves for inputs and for weights. Empty without a pipeline."""
    traces: Many[Trace]
    notes: Many[str] = ()
    """Where the dry run departs from the run itself, in sentences for the reader."""
