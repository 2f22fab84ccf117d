"""The machines: chips, every level of the network, storage tiers and failure rates."""

from importlib.metadata import entry_points
from itertools import pairwise
from math import prod
from typing import Literal, Self

from pydantic import Field, ValidationInfo, field_validator, model_validator

from danlu.spec.description import SpecModel, TupleOf
from danlu.spec.names import Label, Name
from danlu.spec.quantity import IN_FILE, Bandwidth, Bytes, ChipMemory, Flops, Latency, Mtbf, Seconds
from danlu.spec.text import one_line

Dtype = Literal["fp64", "fp32", "tf32", "bf16", "fp16", "fp8"]
CollectiveOp = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "p2p"]
"""Collectives; `p2p` is one message from one rank to another."""
CollectiveAlgorithm = Literal["default", "library", "memory", "host", "levels"]
"""How a collective runs:

- default: as a run does it unasked
- library: by the chip's library
- memory: through the memory of the host that all its ranks are on
- host: inside each host first, then between hosts
- levels: inside each level of the network, from the innermost outwards
"""
OperatorName = Literal[
    "matmul",
    "attention",
    "attention_backward",
    "norm",
    "norm_backward",
    "rotation",
    "rotation_backward",
    "activation",
    "activation_backward",
    "add",
    "copy",
    "loss",
    "loss_backward",
    "dispatch",
    "dispatch_backward",
    "optimizer",
    "unit",
    "split",
]
"""Operators that `danlu probe` measures by themselves. The size of each:

- matmul: FLOPs of one matmul
- attention: tokens of a sequence; seconds of one head of 64 features
- norm, rotation, activation, add, copy, loss, dispatch: elements of the residual stream, of queries and keys, of the
  hidden layer, of a sum, of a copy, of the logits, of token copies times the width
- optimizer: parameters
- unit: parameters of a module sharded over one rank: gathered twice, reduced once, without compute
- split: tensor-parallel layers over two ranks, forward and backward, less the compute of a rank: the host's work on
  distributed tensors, and collectives of `TP_PROBE_TOKENS` × `TP_PROBE_WIDTH` elements
"""
MAX_CHIPS = 10**8
"""More than any machine has; a larger product of fan-outs is a mistake."""
TP_PROBE_TOKENS = 256
TP_PROBE_WIDTH = 256
"""Activations of the layers that `split` is measured with."""


class TimingCurve(SpecModel):
    """Seconds measured at several sizes, in growing order."""

    sizes: TupleOf[float] = Field(min_length=2, max_length=10_000)
    """Measured sizes: bytes, FLOPs or elements, depending on the operation."""
    seconds: TupleOf[float] = Field(min_length=2, max_length=10_000)
    """Time of each size."""

    @model_validator(mode="after")
    def _growing(self) -> Self:
        if len(self.sizes) != len(self.seconds):
            raise ValueError(
                f"`sizes` and `seconds` must have the same length, but have {len(self.sizes)} and {len(self.seconds)}\n"
                "measure again with danlu probe"
            )
        if self.sizes[0] <= 0 or any(low >= high for low, high in pairwise(self.sizes)):
            raise ValueError("`sizes` must be above 0 and increasing, but are not\nsort them")
        if min(self.seconds) <= 0:
            raise ValueError(
                f"`seconds` must be above 0, but one is {min(self.seconds)}\nmeasure again with danlu probe"
            )
        return self


class CollectiveCurve(TimingCurve):
    """Seconds of one collective over some ranks, by bytes of the caller's buffer.

    With several algorithms of a collective, a run takes the fastest at each size, and predictions take its time.
    """

    operation: CollectiveOp
    """The collective."""
    ranks: int = Field(ge=2, le=10**8)
    """Ranks of a group; all groups of the machine run at once."""
    algorithm: CollectiveAlgorithm = "default"
    """By which it ran; a run chooses only among named ones, which `danlu comm tune` measures."""


class Chip(SpecModel):
    """One accelerator (or one CPU socket or core group owned by a rank)."""

    name: Label
    """Display name of the chip."""
    kind: Label
    """Name of the chip descriptor that drives it: cpu, cuda, rocm, ascend, or one a package adds."""
    memory: ChipMemory
    """Memory of one chip."""
    memory_bandwidth: Bandwidth
    """Bandwidth of the chip's memory."""
    peak: dict[Dtype, Flops]
    """Dense matrix-multiply peak by precision."""
    measured: bool = False
    """True when the peaks were measured by `danlu probe` rather than taken from a data sheet."""
    operators: dict[Dtype, dict[OperatorName, TimingCurve]] = Field(default_factory=dict)
    """Measured times of the framework's operators, by precision, with all chips of a node at work.

    If given, predictions use them; otherwise the data sheet and calibrated efficiencies.
    """
    alone: float = Field(default=1.0, ge=1.0, le=10_000)
    """How many times faster a chip computes while the others of its node are idle: above 1 if they share cores."""
    spread: float | None = Field(default=None, ge=0.0, le=100)
    """Relative standard deviation of the time of equal work on different chips; a calibrated default if omitted."""
    overlaps: bool = True
    """Whether collectives overlap with compute; on a CPU they are blocking calls."""

    @field_validator("kind")
    @classmethod
    def _known(cls, kind: str, info: ValidationInfo) -> str:
        if not (info.context and info.context.get(IN_FILE)):
            return kind  # looking through installed packages takes 20 ms, and a thousand chips are made to validate
        known = sorted({point.name for point in entry_points(group="danlu.chips")})
        if kind not in known:
            raise ValueError(
                f"a chip of an installed package: {', '.join(known)}\n"
                f"install the package that adds {one_line(kind)}, or name the one that drives this chip"
            )
        return kind


class NetworkLevel(SpecModel):
    """One level of the network: it joins `fanout` units of the level below."""

    name: Name
    """Name in a plan's `mapping` and in `danlu plan --what-if`."""
    fanout: int = Field(ge=1, le=10**7)
    """Chips, or units of the level below, that one unit joins."""
    bandwidth: Bandwidth
    """Of one chip into this level, one direction."""
    latency: Latency
    """Of one small message between two chips that this level joins."""
    oversubscription: float = Field(default=1.0, ge=1.0, le=10_000)
    """Oversubscription ratio of this level; 1 is a full fat tree."""
    collectives: TupleOf[CollectiveCurve] = ()
    """Measured times of collectives in groups that span this level."""


class StorageTier(SpecModel):
    """Storage for checkpoints and data."""

    name: Name
    """Name of the tier."""
    kind: Literal["memory", "local", "shared", "object"]
    """A node's memory or disk, a file system that all nodes share, or an object store."""
    capacity: Bytes
    """Of one node for `memory` and `local`, of all nodes together for `shared` and `object`."""
    read: Bandwidth
    """Of one node for `memory` and `local`, of all nodes together for `shared` and `object`."""
    write: Bandwidth
    """As `read`."""


class FailureRates(SpecModel):
    """How often nodes fail, and what a restart costs."""

    node_mtbf: Mtbf
    """Mean time between failures of one node."""
    restart: Seconds = 60.0
    """From a failure to the first new step, without the lost work."""


class Cluster(SpecModel):
    """The machine. Levels go from the innermost (chips in a node) outwards."""

    name: Label
    """Name of the machine."""
    chip: Chip
    """The chip of one rank; all are alike."""
    levels: TupleOf[NetworkLevel] = Field(min_length=1, max_length=16)
    """Every level of the network, the innermost (chips in a node) first."""
    tiers: TupleOf[StorageTier] = Field(default=(), max_length=16)
    """Storage for checkpoints and data, the fastest first."""
    failures: FailureRates | None = None
    """Failure rates; without them, goodput is not predicted."""
    source: str = ""
    """Source of the figures."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        names = [level.name for level in self.levels]
        if len(set(names)) != len(names):
            raise ValueError(f"`levels` must have distinct names, but are {', '.join(names)} instead\nrename one")
        if self.chips > MAX_CHIPS:
            raise ValueError(
                f"`levels` must join at most {MAX_CHIPS:,} chips in all, but join {self.chips:.3g}\nsmaller fan-outs"
            )
        return self

    @property
    def chips(self) -> int:
        """Chips in the cluster."""
        return prod(level.fanout for level in self.levels)

    @property
    def chips_per_node(self) -> int:
        """Chips that share one host: the fan-out of the innermost level."""
        return self.levels[0].fanout
