"""The machines: chips, every level of the network, storage tiers and failure rates."""

from itertools import pairwise
from math import prod
from typing import Literal, Self

from pydantic import Field, model_validator

from danlu.spec.description import Bandwidth, Bytes, Count, Description, Flops, Many, Seconds

Dtype = Literal["fp64", "fp32", "tf32", "bf16", "fp16", "fp8"]
Operation = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "p2p"]
"""What ranks do together; `p2p` is one message from one rank to another."""
Operator = Literal[
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
"""What a chip's time is made of, as `danlu probe` measures it by itself. The size of each:

- matmul: FLOPs of one product
- attention: tokens of a sequence; seconds of one head of 64 features
- norm, rotation, activation, add, copy, loss, dispatch: elements of the stream, of queries and keys, of the hidden
  layer, of a sum, of a copy, of the scores, of token copies times the width
- optimizer: parameters
- unit: parameters of a module that is sharded over one rank: gathered twice, reduced once, and nothing computed
- split: layers whose matrices two ranks share, forward and backward, less what a rank computes of them: the host's work
  on distributed tensors, and collectives of `SHARED_TOKENS` × `SHARED_WIDTH` elements
"""
SHARED_TOKENS = 256
SHARED_WIDTH = 256
"""The stream of the layers that `split` is measured with."""


class Curve(Description):
    """Seconds measured at several sizes, in growing order."""

    sizes: Many[float] = Field(min_length=2)
    seconds: Many[float] = Field(min_length=2)

    @model_validator(mode="after")
    def _growing(self) -> Self:
        if len(self.sizes) != len(self.seconds):
            raise ValueError(
                f"`sizes` and `seconds` must be as many, but are {len(self.sizes)} and {len(self.seconds)} instead\n"
                "measure again with danlu probe"
            )
        if self.sizes[0] <= 0 or any(low >= high for low, high in pairwise(self.sizes)):
            raise ValueError("`sizes` must be above 0 and grow, but do not\nsort them")
        if min(self.seconds) <= 0:
            raise ValueError(
                f"`seconds` must be above 0, but one is {min(self.seconds)}\nmeasure again with danlu probe"
            )
        return self


class Collective(Curve):
    """Seconds of one operation over some ranks, by bytes of the buffer that its caller sees."""

    operation: Operation
    ranks: int = Field(ge=2)
    """Members of a group; all groups of the machine at work at once."""


class Chip(Description):
    """One accelerator (or one CPU socket or core group that a rank owns)."""

    name: str
    kind: str
    """Name of the chip descriptor that drives it: cpu, cuda, rocm, ascend, or one a package adds."""
    memory: Bytes
    memory_bandwidth: Bandwidth
    peak: dict[Dtype, Flops]
    """Dense matrix-multiply peak by precision."""
    measured: bool = False
    """True when the peaks were measured by `danlu probe` rather than taken from a data sheet."""
    operators: dict[Dtype, dict[Operator, Curve]] = Field(default_factory=dict)
    """What the framework's operators were measured to take, by precision, all chips of a node at work.

    Where they are given, predictions are made of them; otherwise of the data sheet and of what other chips get out of
    theirs.
    """
    alone: float = Field(default=1.0, ge=1.0)
    """How many times faster a chip computes while the others of its node rest: above 1 where they share cores."""
    spread: float | None = Field(default=None, ge=0.0)
    """Standard deviation of what equal work takes on different chips, as a share; as of other chips when left out."""
    overlaps: bool = True
    """Whether collectives run while the chip computes; on a CPU they are calls that wait."""


class Level(Description):
    """One level of the network: `fanout` things of the level below are joined by it."""

    name: str
    fanout: Count
    bandwidth: Bandwidth
    """Of one chip into this level, one direction."""
    latency: Seconds
    oversubscription: float = Field(default=1.0, ge=1.0)
    """How much narrower this level is than what is plugged into it; 1 is a full fat tree."""
    collectives: Many[Collective] = ()
    """What operations were measured to take in groups whose members lie farthest apart on this level."""


class Tier(Description):
    """A place checkpoints and data can live."""

    name: str
    kind: Literal["memory", "local", "shared", "object"]
    capacity: Bytes
    """Of one node for `memory` and `local`, of the whole cluster for `shared` and `object`."""
    read: Bandwidth
    """Of one node for `memory` and `local`, of the whole cluster for `shared` and `object`."""
    write: Bandwidth


class Failures(Description):
    """How often things break, and what a restart costs."""

    node_mtbf: Seconds
    """Mean time between failures of one node."""
    restart: Seconds = 60.0
    """From a failure to the first new step, without the work that was lost."""


class Cluster(Description):
    """What the run stands on. Levels go from the innermost (chips in a node) outwards."""

    name: str
    chip: Chip
    levels: Many[Level] = Field(min_length=1)
    tiers: Many[Tier] = ()
    failures: Failures | None = None
    source: str = ""
    """Where the figures come from."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        names = [level.name for level in self.levels]
        if len(set(names)) != len(names):
            raise ValueError(f"`levels` must have distinct names, but are {', '.join(names)} instead\nrename one")
        return self

    @property
    def chips(self) -> int:
        """Chips in the whole cluster."""
        return prod(level.fanout for level in self.levels)

    @property
    def chips_per_node(self) -> int:
        """Chips that share one host: the fan-out of the innermost level."""
        return self.levels[0].fanout
