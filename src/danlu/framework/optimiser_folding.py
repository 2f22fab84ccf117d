"""The optimiser's part of a folded step: it works on the tensors of all layers at once, or layer by layer in a loop.

Its operators are told apart by name alone, because sizes grow with the layers: an operator that both steps have is
continued number by number (bytes, lengths of lists, sizes of tensors), one that only the longer step has is a turn of
a loop over layers and is repeated.
"""

from collections import Counter
from dataclasses import dataclass
from difflib import SequenceMatcher

import numpy as np
from numpy.typing import NDArray

from danlu.framework.operators import Signature
from danlu.framework.recording import OperatorKey
from danlu.framework.step_record import CollectiveKey, StepRecord

Group = list[NDArray[np.int64]]
"""Changes of live bytes around one operator, rises and falls in turn."""


class NotLinearError(RuntimeError):
    """The optimiser's part of two steps does not grow evenly with the layers."""


@dataclass(frozen=True)
class OptimiserPart:
    """The optimiser's part of the whole step."""

    operators: list[OperatorKey]
    collectives: list[CollectiveKey]
    changes: NDArray[np.int64]
    at: NDArray[np.int64]
    """Operators of this part that ran before."""


@dataclass(frozen=True)
class _Growth:
    """How a number goes on: the long step has a layer more than the short one in each of `runs`, the whole `more`."""

    runs: int
    more: int

    def number(self, short: int, long: int) -> int:
        added, rest = divmod(long - short, self.runs)
        if rest:
            raise NotLinearError(f"{short} and {long} do not differ by the same for {self.runs} layers")
        return long + added * self.more

    def signature(self, short: Signature, long: Signature) -> Signature:
        if short[0] != long[0] or len(short[1]) != len(long[1]):
            raise NotLinearError(f"a tensor like {short} became one like {long}")
        return long[0], tuple(self.number(a, b) for a, b in zip(short[1], long[1], strict=True))

    def signatures(self, short: tuple[Signature, ...], long: tuple[Signature, ...]) -> tuple[Signature, ...]:
        """Tensors one by one; in a list that became longer, so many of each kind."""
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
            raise NotLinearError(f"{short} became {long}")
        return long._replace(size=self.number(short.size, long.size))

    def group(self, short: Group, long: Group) -> Group:
        if len(short) != len(long):
            raise NotLinearError("tensors come and go in another order")
        return [
            np.array([self.number(int(a), int(b)) for a, b in zip(before, after, strict=True)])
            for before, after in zip(short, long, strict=True)
        ]


def fold_optimiser(short: StepRecord, long: StepRecord, runs: int, more: int) -> OptimiserPart:
    """Continue the optimiser's part of two steps to the whole one."""
    growth = _Growth(runs, more)
    ours, theirs = short.optimiser_operators, long.optimiser_operators
    before, after = _groups(short), _groups(long)
    # Group 0 is what happens before the first operator, group n what happens at the n-th.
    operators: list[OperatorKey] = []
    groups: list[Group] = [growth.group(before[0], after[0])]
    turns: list[int] = []
    turn_at = 0
    matcher = SequenceMatcher(None, [key.name for key in ours], [key.name for key in theirs], autojunk=False)
    for what, start, _, first, last in matcher.get_opcodes():
        if what == "equal":
            for position in range(last - first):
                operators.append(growth.operator(ours[start + position], theirs[first + position]))
                groups.append(growth.group(before[start + position + 1], after[first + position + 1]))
        elif what == "insert":
            operators += theirs[first:last]
            groups += after[first + 1 : last + 1]
            turns += range(first, last)
            turn_at = len(operators)
        else:
            raise NotLinearError("the optimiser does other things with one more layer")
    turn = _one_turn(turns, theirs, runs)
    operators[turn_at:turn_at] = [theirs[each] for each in turn] * more
    groups[turn_at + 1 : turn_at + 1] = [after[each + 1] for each in turn] * more
    if len(short.optimiser_collectives) != len(long.optimiser_collectives):
        raise NotLinearError("the optimiser calls more collectives with one more layer")
    changes = [(at, change) for at, group in enumerate(groups) for change in group]
    kinds = long.entries.changes.shape[1]
    return OptimiserPart(
        operators=operators,
        collectives=list(map(growth.collective, short.optimiser_collectives, long.optimiser_collectives)),
        changes=np.array([change for _, change in changes], dtype=np.int64).reshape(-1, kinds),
        at=np.array([at for at, _ in changes], dtype=np.int64),
    )


def _one_turn(turns: list[int], operators: list[OperatorKey], runs: int) -> list[int]:
    """The operators of one turn of a loop, of which the long step has one more for each run."""
    length, rest = divmod(len(turns), runs)
    if rest or any(operators[each] != operators[turns[at % length]] for at, each in enumerate(turns)):
        raise NotLinearError("a loop over layers does other things in its last turn")
    return turns[:length]


def _groups(record: StepRecord) -> list[Group]:
    """Changes of live bytes around every operator."""
    groups: list[Group] = [[] for _ in range(len(record.optimiser_operators) + 1)]
    entries = record.entries
    before = record.operators.total()
    optimising = np.array([phase == "optimiser" for phase, _, _ in record.contexts])
    for row in np.flatnonzero(optimising[entries.context]):
        groups[int(entries.at[row]) - before].append(entries.changes[row])
    return groups
