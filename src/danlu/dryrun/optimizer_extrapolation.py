"""The optimizer phase of an extrapolated step: it works on the tensors of all layers at once, or in a loop over layers.

Operators are matched by name alone, because sizes grow with the layers: the numbers of an operator that both steps
have (bytes, lengths of lists, sizes of tensors) are extrapolated; one that only the longer step has is an iteration of
a loop over layers and is repeated.
"""

from collections import Counter
from dataclasses import dataclass
from difflib import SequenceMatcher

import numpy as np
from numpy.typing import NDArray

from danlu.dryrun.operator_info import Signature
from danlu.dryrun.step_record import CollectiveKey, StepRecord
from danlu.dryrun.step_recorder import OperatorKey

OperatorChanges = list[NDArray[np.int64]]
"""Changes of live bytes around one operator, alternating in sign."""


class NonlinearGrowthError(RuntimeError):
    """The optimizer phase of two steps does not grow linearly with the layers."""


@dataclass(frozen=True)
class OptimizerPhase:
    """The optimizer phase of the full step."""

    operators: list[OperatorKey]
    collectives: list[CollectiveKey]
    changes: NDArray[np.int64]
    at: NDArray[np.int64]
    """Operators of this phase that ran before."""


@dataclass(frozen=True)
class _LinearGrowth:
    """Extrapolates numbers: the long step has one layer more than the short one per run, the full one `more`."""

    runs: int
    more: int

    def number(self, short: int, long: int) -> int:
        added, rest = divmod(long - short, self.runs)
        if rest:
            raise NonlinearGrowthError(f"{short} and {long} do not differ by a multiple of {self.runs} layers")
        return long + added * self.more

    def signature(self, short: Signature, long: Signature) -> Signature:
        if short[0] != long[0] or len(short[1]) != len(long[1]):
            raise NonlinearGrowthError(f"a tensor {short} became {long}")
        return long[0], tuple(self.number(a, b) for a, b in zip(short[1], long[1], strict=True))

    def signatures(self, short: tuple[Signature, ...], long: tuple[Signature, ...]) -> tuple[Signature, ...]:
        """Tensors one by one; in a list that grew, by the count of each signature."""
        if len(short) == len(long):
            return tuple(self.signature(a, b) for a, b in zip(short, long, strict=True))
        before, after = Counter(short), Counter(long)
        return tuple(each for each in after for _ in range(self.number(before[each], after[each])))

    def operator(self, short: OperatorKey, long: OperatorKey) -> OperatorKey:
        return long._replace(
            inputs=self.signatures(short.inputs, long.inputs),
            outputs=self.signatures(short.outputs, long.outputs),
            flops=float(self.number(int(short.flops), int(long.flops))),
            bytes=self.number(short.bytes, long.bytes),
        )

    def collective(self, short: CollectiveKey, long: CollectiveKey) -> CollectiveKey:
        if short._replace(size=0) != long._replace(size=0):
            raise NonlinearGrowthError(f"{short} became {long}")
        return long._replace(size=self.number(short.size, long.size))

    def group(self, short: OperatorChanges, long: OperatorChanges) -> OperatorChanges:
        if len(short) != len(long):
            raise NonlinearGrowthError("tensors are allocated and freed in another order")
        return [
            np.array([self.number(int(a), int(b)) for a, b in zip(before, after, strict=True)])
            for before, after in zip(short, long, strict=True)
        ]


def recorded_optimizer(record: StepRecord) -> OptimizerPhase:
    """The optimizer phase of a step that was run with all layers."""
    changes = [(at, change) for at, group in enumerate(_groups(record)) for change in group]
    return OptimizerPhase(
        operators=record.optimizer_operators,
        collectives=record.optimizer_collectives,
        changes=np.array([change for _, change in changes], dtype=np.int64).reshape(
            -1, record.entries.changes.shape[1]
        ),
        at=np.array([at for at, _ in changes], dtype=np.int64),
    )


def extrapolate_optimizer(short: StepRecord, long: StepRecord, runs: int, more: int) -> OptimizerPhase:
    """Extrapolate the optimizer phase of two steps to the full one."""
    growth = _LinearGrowth(runs, more)
    ours, theirs = short.optimizer_operators, long.optimizer_operators
    before, after = _groups(short), _groups(long)
    # Group 0 is what happens before the first operator, group n what happens at the n-th.
    operators: list[OperatorKey] = []
    groups: list[OperatorChanges] = [growth.group(before[0], after[0])]
    added: list[int] = []
    insert_at = 0
    matcher = SequenceMatcher(None, [key.name for key in ours], [key.name for key in theirs], autojunk=False)
    for what, start, _, first, last in matcher.get_opcodes():
        if what == "equal":
            for position in range(last - first):
                operators.append(growth.operator(ours[start + position], theirs[first + position]))
                groups.append(growth.group(before[start + position + 1], after[first + position + 1]))
        elif what == "insert":
            operators += theirs[first:last]
            groups += after[first + 1 : last + 1]
            added += range(first, last)
            insert_at = len(operators)
        else:
            raise NonlinearGrowthError("the optimizer step does not grow linearly with layers: operators differ")
    iteration = _one_iteration(added, theirs, runs)
    operators[insert_at:insert_at] = [theirs[each] for each in iteration] * more
    groups[insert_at + 1 : insert_at + 1] = [after[each + 1] for each in iteration] * more
    if len(short.optimizer_collectives) != len(long.optimizer_collectives):
        raise NonlinearGrowthError("the optimizer step does not grow linearly with layers: it has more collectives")
    changes = [(at, change) for at, group in enumerate(groups) for change in group]
    kinds = long.entries.changes.shape[1]
    return OptimizerPhase(
        operators=operators,
        collectives=list(map(growth.collective, short.optimizer_collectives, long.optimizer_collectives)),
        changes=np.array([change for _, change in changes], dtype=np.int64).reshape(-1, kinds),
        at=np.array([at for at, _ in changes], dtype=np.int64),
    )


def _one_iteration(added: list[int], operators: list[OperatorKey], runs: int) -> list[int]:
    """The operators of one loop iteration, of which the long step has one more for each run."""
    length, rest = divmod(len(added), runs)
    if rest or any(operators[each] != operators[added[at % length]] for at, each in enumerate(added)):
        raise NonlinearGrowthError("the optimizer step does not grow linearly with layers: iterations of a loop differ")
    return added[:length]


def _groups(record: StepRecord) -> list[OperatorChanges]:
    """Changes of live bytes around every operator."""
    groups: list[OperatorChanges] = [[] for _ in range(len(record.optimizer_operators) + 1)]
    entries = record.entries
    before = record.operators.total()
    in_optimizer = np.array([phase == "optimizer" for phase, _, _ in record.contexts])
    for row in np.flatnonzero(in_optimizer[entries.context]):
        groups[int(entries.operator_index[row]) - before].append(entries.changes[row])
    return groups
