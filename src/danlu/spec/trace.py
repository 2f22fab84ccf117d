"""What ranks do in one optimizer step, recorded by a dry run: operators, collectives, and memory."""

from typing import Literal, get_args

from pydantic import Field

from danlu.spec.description import PositiveInt, SpecModel, TupleOf
from danlu.spec.quantity import Bytes

Phase = Literal["forward", "recompute", "backward", "optimizer"]
MemoryKind = Literal["parameters", "gathered", "gradients", "optimizer", "activations", "communication"]
MEMORY_KINDS: tuple[MemoryKind, ...] = get_args(MemoryKind)
"""Kinds of memory: this rank's shard of the parameters, gathered parameters, gradients, optimizer states, activations
(and temporaries of operators), buffers of collectives."""


class CollectiveStats(SpecModel):
    """Identical calls of one collective."""

    operation: str
    dtype: str
    payload: Bytes
    """Bytes the rank puts into one call (or gets out, for a receive)."""
    wire: Bytes
    """Bytes the rank sends over the network for one call, by rings: an all-gather of n ranks sends n − 1 payloads."""
    axes: str
    """Axes of the mesh its group lies along."""
    ranks: PositiveInt
    level: str = ""
    """Innermost level of the network that joins the group; empty without a cluster."""
    count: PositiveInt

    @property
    def total_payload(self) -> int:
        """Payload of all calls."""
        return self.payload * self.count

    @property
    def total_wire(self) -> int:
        """Bytes on the wire of all calls."""
        return self.wire * self.count


class OperatorStats(SpecModel):
    """Identical calls of one operator."""

    name: str
    """Such as `aten.mm`."""
    phase: Phase
    module: str
    """The innermost module that called it, identical layers under one name: `blocks.*.attention.q`."""
    inputs: TupleOf[str]
    """Dtype and shape of every input tensor: `bf16[4096, 8192]`."""
    outputs: TupleOf[str]
    flops: float = Field(ge=0)
    """Of one call on this rank; 0 for memory-bound operators."""
    bytes: Bytes
    """Read and written by one call."""
    count: PositiveInt


class MemorySample(SpecModel):
    """Bytes alive at one moment of the step, in the order of `MEMORY_KINDS`."""

    at: int = Field(ge=0)
    """Operators of the step that ran before this moment."""
    phase: Phase
    module: str
    """The running module, with its layer number."""
    microbatch: int | None = None
    held: TupleOf[int]

    @property
    def total(self) -> int:
        """Bytes alive."""
        return sum(self.held)


class Trace(SpecModel):
    """One optimizer step of one rank."""

    rank: int = Field(ge=0)
    world: PositiveInt
    place: dict[str, int]
    """The rank's coordinate along every axis."""
    stands_for: PositiveInt
    """Ranks that do the same, including this one: those of the same pp rank."""
    folded: int = Field(default=0, ge=0)
    """Layers that were extrapolated, because they are identical to their neighbors; 0 if all were run."""
    collectives: TupleOf[CollectiveStats]
    operators: TupleOf[OperatorStats]
    memory: TupleOf[MemorySample]
    """A few hundred samples over the step; between two of them no more is held than at the higher one."""
    peak: MemorySample
    """The moment at which most bytes are alive."""
    seconds: float = Field(ge=0)
    """How long the dry run of this rank took."""

    @property
    def flops(self) -> float:
        """FLOPs of the step on this rank, recompute included."""
        return sum(operator.flops * operator.count for operator in self.operators)


class DryRun(SpecModel):
    """One step of a run, without its machines: the traces of ranks that differ."""

    name: str
    """Of the recipe."""
    cluster: str = ""
    levels: TupleOf[str] = ()
    """Levels of the cluster's network, innermost first."""
    memory_limit: Bytes | None = None
    """Memory of one chip, if a cluster was given."""
    precision: str = ""
    """Precision of compute, and so of activations and traffic."""
    degrees: dict[str, int]
    microbatches: PositiveInt
    schedule: TupleOf[TupleOf[str]] = ()
    """The actions of every pp rank in order: `F0.3` is the forward of stage 0 for microbatch 3, `B` a full backward,
    `I` and `W` its halves for inputs and for weights. Empty without a pipeline."""
    traces: TupleOf[Trace]
    notes: TupleOf[str] = ()
    """How the dry run differs from a real run, in sentences for the reader."""
