"""The machines: chips, every level of the network, storage tiers and failure rates."""

from math import prod
from typing import Literal, Self

from pydantic import Field, model_validator

from danlu.spec.description import Bandwidth, Bytes, Count, Description, Flops, Many, Seconds

Dtype = Literal["fp64", "fp32", "tf32", "bf16", "fp16", "fp8"]


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


class Level(Description):
    """One level of the network: `fanout` things of the level below are joined by it."""

    name: str
    fanout: Count
    bandwidth: Bandwidth
    """Of one chip into this level, one direction."""
    latency: Seconds
    oversubscription: float = Field(default=1.0, ge=1.0)
    """How much narrower this level is than what is plugged into it; 1 is a full fat tree."""


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
