"""A layout as the formulas have it beside the same layout as its dry run finds it: what they got wrong, how far.

The dry run is the program itself, so it decides: a layout that the formulas let pass and whose dry run does not fit the
chip is refused.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from danlu.cost.memory import Memory
from danlu.planner.pricing import Pricing
from danlu.planner.search import Choice
from danlu.spec.trace import KINDS, DryRun, Trace

TOLERANCE = 0.1
"""Share of the program's figure up to which a formula is taken for right."""
LITTLE = 0.01
"""Share of all bytes held, or sent, below which a difference does not matter to anybody."""
_GROUPS = {
    "states": (("parameters", "optimizer"), ("parameters", "optimiser")),
    "gradients": (("gradients",), ("gradients",)),
    "activations": (("activations", "logits"), ("activations", "communication")),
    "gathered": (("buffers",), ("gathered",)),
}
"""Bytes by kind: the formula's names, and the dry run's. Both know parameters in fp32, which the formula counts with
the optimiser's states, and buffers of transfers, which it counts with activations."""


@dataclass(frozen=True)
class Line:
    """One figure, both ways."""

    figure: str
    unit: str
    """`bytes` or `FLOPs`."""
    formula: float
    program: float
    matters: bool = True

    @property
    def ratio(self) -> float | None:
        """Formula over program; None where the program has nothing."""
        return self.formula / self.program if self.program else None

    @property
    def is_wrong(self) -> bool:
        """Whether the formula is off by more than the tolerance, in a figure that matters."""
        return self.matters and abs(self.formula - self.program) > TOLERANCE * self.program


@dataclass(frozen=True)
class Verified:
    """A layout with both its figures, for the rank that the program fills most."""

    choice: Choice
    place: int
    """Of that rank on the pipeline."""
    rank: int
    lines: tuple[Line, ...]
    places: tuple[Line, ...]
    """Peaks of every place that was run, in order."""
    device: float
    """Bytes of the chip by the program's peak, with what the allocator, the context and channels take."""
    seconds: float
    """That the dry run took."""
    notes: tuple[str, ...] = ()

    @property
    def is_refused(self) -> bool:
        """Whether the program does not fit a chip that the formulas said it fits."""
        return self.choice.fits and self.device > self.choice.question.memory

    @property
    def wrong(self) -> tuple[Line, ...]:
        """What the formulas got wrong."""
        return tuple(line for line in (*self.places, *self.lines) if line.is_wrong)

    @property
    def verdict(self) -> str:
        """One sentence on what the formulas got wrong, and whether the layout stands."""
        limit = self.choice.question.memory
        off = ", ".join(f"{line.figure} {_percent(line)}" for line in self.wrong)
        told = f"beyond {TOLERANCE:.0%} the formula is off in {off}" if off else f"every figure within {TOLERANCE:.0%}"
        if self.is_refused:
            over = (self.device - limit) / 1e9
            return f"refused: its program takes {over:.1f} GB more than the {limit / 1e9:.1f} GB there are; {told}."
        return f"stands: {told}."


def _percent(line: Line) -> str:
    ratio = line.ratio
    return "with nothing in the program" if ratio is None else f"by {ratio - 1:+.0%}"


def places_to_run(choice: Choice) -> tuple[int, ...]:
    """Places on the pipeline that tell: the first, the last, and the one that the formulas have for the fullest."""
    memories = Pricing(choice.question).by_place(choice.candidate)
    fullest = max(range(len(memories)), key=lambda place: memories[place].allocated)
    return tuple(sorted({0, fullest, len(memories) - 1}))


def verified(choice: Choice, run: DryRun) -> Verified:
    """Hold a layout's formulas against the dry run of some of its ranks."""
    pricing = Pricing(choice.question)
    memories = pricing.by_place(choice.candidate)
    by_place = {trace.place["pp"]: trace for trace in run.traces}
    worst = max(by_place, key=lambda place: by_place[place].peak.total)
    trace = by_place[worst]
    peaks = tuple(
        Line(f"peak, place {place}", "bytes", memories[place].allocated, by_place[place].peak.total)
        for place in sorted(by_place)
    )
    counts = pricing.counts(choice.candidate, worst)
    return Verified(
        choice=choice,
        place=worst,
        rank=trace.rank,
        lines=(
            *_bytes(memories[worst], trace),
            Line("FLOPs of the step", "FLOPs", counts.flops, trace.flops),
            *_sent(counts.sent, trace, _along_all(choice, counts.sent)),
        ),
        places=peaks,
        device=memories[worst].with_allocated(trace.peak.total),
        seconds=sum(each.seconds for each in run.traces),
        notes=run.notes,
    )


def proposed(found: Sequence[Verified]) -> Verified | None:
    """The fastest layout that was not refused."""
    return next((each for each in found if not each.is_refused), None)


def _bytes(memory: Memory, trace: Trace) -> list[Line]:
    held: dict[str, int] = dict(zip(KINDS, trace.peak.held, strict=True))
    lines = []
    for name, (ours, theirs) in _GROUPS.items():
        formula, program = sum(getattr(memory, kind) for kind in ours), sum(held[kind] for kind in theirs)
        matters = abs(formula - program) > LITTLE * trace.peak.total
        lines.append(Line(name, "bytes", formula, program, matters))
    return lines


def _along_all(choice: Choice, formula: dict[str, float]) -> tuple[str, ...]:
    """Axes whose groups are all ranks: the program has one name for them."""
    degrees = choice.candidate.degrees
    ranks = {axis: getattr(degrees, axis) for axis in formula} | {"shard": degrees.shard * degrees.cp}
    return tuple(axis for axis in formula if ranks[axis] == degrees.world)


def _sent(formula: dict[str, float], trace: Trace, along_all: tuple[str, ...]) -> list[Line]:
    """Bytes put into collectives by axis and level; what is received was sent by another."""
    joined = " and ".join(along_all) or "world"
    told: dict[str, float] = {}
    for axis, size in formula.items():
        name = joined if axis in along_all else axis
        told[name] = told.get(name, 0.0) + size
    program: dict[str, float] = {}
    levels: dict[str, str] = {}
    for call in trace.collectives:
        if call.operation != "receive":
            name = joined if call.axes == "world" else call.axes.removeprefix("expert_")
            program[name] = program.get(name, 0.0) + call.total
            levels.setdefault(name, call.level)
    whole = sum(program.values())
    lines = []
    for name in sorted({*told, *program}, key=lambda axis: -program.get(axis, 0.0)):
        first, second = told.get(name, 0.0), program.get(name, 0.0)
        matters = abs(first - second) > LITTLE * whole
        if matters or name in told:
            where = f" ({levels[name]})" if levels.get(name) else ""
            lines.append(Line(f"sent along {name}{where}", "bytes", first, second, matters))
    return lines
