"""One recorded step as plain values, and the trace that is made of it."""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch.distributed as dist
from numpy.typing import NDArray

from danlu.comm.mesh import Mesh
from danlu.comm.record import Call
from danlu.framework.operators import Signature, written_signature
from danlu.framework.recording import OperatorKey, Record
from danlu.memory.live import Entries
from danlu.memory.timeline import Context, instants
from danlu.spec.cluster import Cluster
from danlu.spec.placing import joining_level
from danlu.spec.plan import DENSE_AXES
from danlu.spec.trace import Collective, Operator, Trace

FEW_TENSORS = 8
"""Tensors of an operator that are listed one by one; of longer lists, those that are alike are counted."""


class CollectiveKey(NamedTuple):
    """What calls of a collective have in common when they are alike."""

    operation: str
    dtype: str
    size: int
    axes: str
    ranks: int
    level: str


@dataclass(frozen=True)
class StepRecord:
    """What a rank did in a step; the optimiser's part is in order, the rest counted."""

    operators: Counter[OperatorKey]
    optimiser_operators: list[OperatorKey]
    collectives: Counter[CollectiveKey]
    optimiser_collectives: list[CollectiveKey]
    entries: Entries
    contexts: list[Context]
    seconds: float

    @property
    def timeline(self) -> "Timeline":
        """The memory of the step, entry by entry."""
        entries = self.entries
        return Timeline(entries.changes, entries.at, lambda row: self.contexts[int(entries.context[row])])


@dataclass(frozen=True)
class Timeline:
    """Live bytes over a step: changes by kind and operators that ran before, a row an entry; and what ran at a row."""

    changes: NDArray[np.int64]
    at: NDArray[np.int64]
    context: Callable[[int], Context]


def step_record(
    record: Record, entries: Entries, contexts: list[Context], cluster: Cluster | None, seconds: float
) -> StepRecord:
    """Let go of everything live in a record; to be called while the groups of the step still exist."""

    # Once a group, not once a call: a group may have 100,000 ranks.
    groups = {call.group for call in (*record.calls, *record.optimiser_calls)}
    levels = {group: _level(group, cluster) for group in groups}

    def key(call: Call) -> CollectiveKey:
        return CollectiveKey(call.operation, call.dtype, call.size, call.axes, call.group.size(), levels[call.group])

    return StepRecord(
        operators=record.operators,
        optimiser_operators=record.optimiser_operators,
        collectives=Counter(map(key, record.calls)),
        optimiser_collectives=list(map(key, record.optimiser_calls)),
        entries=entries,
        contexts=contexts,
        seconds=seconds,
    )


def trace(mesh: Mesh, record: StepRecord, timeline: Timeline | None = None, folded: int = 0) -> Trace:
    """What was recorded, for people and files: calls that are alike counted together in the order of their first."""
    degrees = mesh.plan.degrees
    timeline = timeline or record.timeline
    memory, peak = instants(timeline.changes, timeline.at, timeline.context)
    axes = [*DENSE_AXES, *(["ep"] if degrees.ep > 1 else [])]
    return Trace(
        rank=mesh.rank,
        world=degrees.world,
        place={axis: mesh.place[axis] for axis in axes},
        stands_for=degrees.stage,
        folded=folded,
        collectives=tuple(
            Collective(**key._asdict(), count=count)
            for key, count in (record.collectives + Counter(record.optimiser_collectives)).items()
        ),
        operators=tuple(
            Operator(**key._asdict() | {"inputs": _written(key.inputs), "outputs": _written(key.outputs)}, count=count)
            for key, count in (record.operators + Counter(record.optimiser_operators)).items()
        ),
        memory=memory,
        peak=peak,
        seconds=record.seconds,
    )


def _written(signatures: Iterable[Signature]) -> tuple[str, ...]:
    written = [written_signature(signature) for signature in signatures]
    if len(written) <= FEW_TENSORS:
        return tuple(written)
    return tuple(f"{text} × {count:,}" if count > 1 else text for text, count in Counter(written).items())


def _level(group: dist.ProcessGroup, cluster: Cluster | None) -> str:
    """The innermost level of the network that joins all ranks of a group."""
    if cluster is None:
        return ""
    return joining_level(dist.get_process_group_ranks(group), dist.get_world_size(), cluster)
