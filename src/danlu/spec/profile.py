"""What `danlu profile` asks of ranks, and what each of them measured: steps by part, collectives, a timeline."""

from typing import Any

from pydantic import Field

from danlu.spec.description import PositiveInt, SpecModel, TupleOf
from danlu.spec.quantity import Bytes


class ProfileRequest(SpecModel):
    """Which steps of which ranks are profiled."""

    steps: PositiveInt
    """Steps that are profiled; as many are timed before, without a profiler."""
    warmup: int = Field(ge=0)
    """Steps before those."""
    ranks: TupleOf[int]
    """Ranks that are profiled; the others take the same steps."""


class ProfiledStep(SpecModel):
    """One step of one rank."""

    step: int = Field(ge=0)
    seconds: float = Field(gt=0)
    """By the training loop's own clock."""
    parts: dict[str, float]
    """Seconds by part of `danlu plan`, by the profiler's clock."""


class ProfiledCollectives(SpecModel):
    """Identical calls of one collective in the profiled steps."""

    operation: str
    dtype: str
    payload: Bytes
    """Bytes the rank puts into one call (or gets out, for a receive)."""
    axes: str
    """Axes of the mesh its group lies along."""
    ranks: PositiveInt
    count: PositiveInt
    """Calls in all profiled steps."""
    seconds: float = Field(ge=0)
    """Time of all calls in which the rank did nothing else."""


class RankProfile(SpecModel):
    """The profiled steps of one rank."""

    rank: int = Field(ge=0)
    place: dict[str, int]
    """The rank's coordinate along every axis."""
    host: str
    pid: int
    started_ns: int
    """When the first profiled step began, in nanoseconds since the epoch."""
    steps: TupleOf[ProfiledStep]
    unprofiled_seconds: TupleOf[float]
    """Steps taken without a profiler: what the profiler itself costs is the difference."""
    collectives: TupleOf[ProfiledCollectives]
    dropped_events: int = Field(ge=0)
    """Operators that the timeline leaves out: those inside another one, and the shortest."""
    timeline: TupleOf[dict[str, Any]]
    """Events of the Chrome trace format; their times are microseconds since `started_ns`."""
