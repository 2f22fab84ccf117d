"""A recorded step as plain values, and the trace that is built from it."""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch.distributed import ProcessGroup

from danlu.comm.collective_call import CollectiveCall
from danlu.comm.mesh import ParallelMesh
from danlu.comm.world import ranks_of
from danlu.cost.collectives import wire_bytes
from danlu.dryrun.live_memory import MemoryChanges
from danlu.dryrun.memory_timeline import StepContext, sample_instants
from danlu.dryrun.operator_info import Signature, format_signature
from danlu.dryrun.step_recorder import OperatorKey, OperatorLog
from danlu.spec.cluster import Cluster
from danlu.spec.plan import DENSE_AXES
from danlu.spec.rank_placement import innermost_common_level
from danlu.spec.trace import CollectiveStats, OperatorStats, Trace

MAX_LISTED_TENSORS = 8
"""Tensors of an operator that are listed one by one; in longer lists, equal ones are counted."""


class CollectiveKey(NamedTuple):
    """What equal calls of a collective have in common."""

    operation: str
    dtype: str
    size: int
    axes: str
    ranks: int
    level: str


@dataclass(frozen=True)
class StepRecord:
    """What a rank did in a step; the optimizer phase is in order, the rest is counted."""

    operators: Counter[OperatorKey]
    optimizer_operators: list[OperatorKey]
    collectives: Counter[CollectiveKey]
    optimizer_collectives: list[CollectiveKey]
    entries: MemoryChanges
    contexts: list[StepContext]
    seconds: float

    @property
    def timeline(self) -> "MemoryTimeline":
        """The memory of the step, change by change."""
        entries = self.entries
        return MemoryTimeline(
            entries.changes, entries.operator_index, lambda row: self.contexts[int(entries.context[row])]
        )


@dataclass(frozen=True)
class MemoryTimeline:
    """Live bytes over a step: a row for each change, with operators that ran before; and what ran at a row."""

    changes: NDArray[np.int64]
    at: NDArray[np.int64]
    context: Callable[[int], StepContext]


def freeze_record(
    record: OperatorLog,
    entries: MemoryChanges,
    contexts: list[StepContext],
    cluster: Cluster | None,
    world_size: int,
    seconds: float,
) -> StepRecord:
    """A record as plain values; called while the process groups of the step still exist."""

    # Once per group, not per call: a group may have 100,000 ranks.
    groups = {call.group for call in (*record.collectives, *record.optimizer_collectives)}
    levels = {group: _level(group, cluster, world_size) for group in groups}

    def key(call: CollectiveCall) -> CollectiveKey:
        return CollectiveKey(call.operation, call.dtype, call.size, call.axes, call.group.size(), levels[call.group])

    return StepRecord(
        operators=record.operators,
        optimizer_operators=record.optimizer_operators,
        collectives=Counter(map(key, record.collectives)),
        optimizer_collectives=list(map(key, record.optimizer_collectives)),
        entries=entries,
        contexts=contexts,
        seconds=seconds,
    )


def build_trace(
    mesh: ParallelMesh, record: StepRecord, timeline: MemoryTimeline | None = None, skipped_layers: int = 0
) -> Trace:
    """The record as a `Trace`: equal calls are counted together, in the order of their first."""
    degrees = mesh.plan.degrees
    timeline = timeline or record.timeline
    memory, peak = sample_instants(timeline.changes, timeline.at, timeline.context)
    axes = [*DENSE_AXES, *(["ep"] if degrees.ep > 1 else [])]
    return Trace(
        rank=mesh.rank,
        world=degrees.world,
        place={axis: mesh.coordinates[axis] for axis in axes},
        stands_for=degrees.ranks_per_stage,
        folded=skipped_layers,
        collectives=tuple(
            _collective(key, count)
            for key, count in (record.collectives + Counter(record.optimizer_collectives)).items()
        ),
        operators=tuple(
            OperatorStats(
                **key._asdict() | {"inputs": _written(key.inputs), "outputs": _written(key.outputs)}, count=count
            )
            for key, count in (record.operators + Counter(record.optimizer_operators)).items()
        ),
        memory=memory,
        peak=peak,
        seconds=record.seconds,
    )


def _collective(key: CollectiveKey, count: int) -> CollectiveStats:
    return CollectiveStats(
        operation=key.operation,
        dtype=key.dtype,
        payload=key.size,
        wire=round(wire_bytes(key.operation, key.ranks, key.size)),
        axes=key.axes,
        ranks=key.ranks,
        level=key.level,
        count=count,
    )


def _written(signatures: Iterable[Signature]) -> tuple[str, ...]:
    written = [format_signature(signature) for signature in signatures]
    if len(written) <= MAX_LISTED_TENSORS:
        return tuple(written)
    return tuple(f"{text} × {count:,}" if count > 1 else text for text, count in Counter(written).items())


def _level(group: ProcessGroup, cluster: Cluster | None, world_size: int) -> str:
    """The innermost network level that connects all ranks of a group."""
    if cluster is None:
        return ""
    return innermost_common_level(ranks_of(group), world_size, cluster)
