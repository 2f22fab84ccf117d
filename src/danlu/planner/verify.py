"""Compares the predicted memory, FLOPs and traffic of a layout with its dry run.

The dry run executes the real program, so it decides: a layout that is predicted to fit but whose dry run does not is
rejected.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from danlu.cost.memory import MemoryEstimate
from danlu.planner.pricing import PlanPricer, PricedPlan
from danlu.spec.trace import MEMORY_KINDS, DryRun, Trace

TOLERANCE = 0.1
"""Relative error up to which a prediction counts as correct."""
NEGLIGIBLE = 0.01
"""Share of all bytes held, or sent, below which a difference is ignored."""
_GROUPS = {
    "states": (("parameters", "optimizer"), ("parameters", "optimizer")),
    "gradients": (("gradients",), ("gradients",)),
    "activations": (("activations", "logits"), ("activations", "communication")),
    "gathered": (("buffers",), ("gathered",)),
}
"""Bytes by kind: the cost model's names, and the dry run's. The cost model counts fp32 parameters with the optimizer
states, and transfer buffers with activations."""


@dataclass(frozen=True)
class FigureComparison:
    """One figure, predicted and from the dry run."""

    figure: str
    unit: str
    """`bytes` or `FLOPs`."""
    predicted: float
    dry_run: float
    matters: bool = True

    @property
    def ratio(self) -> float | None:
        """Predicted over dry run; None if the dry run has nothing."""
        return self.predicted / self.dry_run if self.dry_run else None

    @property
    def is_wrong(self) -> bool:
        """Whether the prediction is off by more than the tolerance, in a figure that matters."""
        return self.matters and abs(self.predicted - self.dry_run) > TOLERANCE * self.dry_run


@dataclass(frozen=True)
class LayoutVerification:
    """A layout with its figures for the rank that is fullest in the dry run."""

    priced_plan: PricedPlan
    pp_rank: int
    """Of that rank."""
    rank: int
    figures: tuple[FigureComparison, ...]
    pp_rank_peaks: tuple[FigureComparison, ...]
    """Peaks of every pp rank that was run, in order."""
    device_bytes: float
    """Device memory by the dry run's peak, with allocator overhead, context and channels."""
    seconds: float
    """Duration of the dry run."""
    notes: tuple[str, ...] = ()

    @property
    def is_refused(self) -> bool:
        """Whether the dry run does not fit a chip although the prediction does."""
        return self.priced_plan.fits and self.device_bytes > self.priced_plan.request.usable_memory

    @property
    def wrong(self) -> tuple[FigureComparison, ...]:
        """Figures that were predicted wrong."""
        return tuple(line for line in (*self.pp_rank_peaks, *self.figures) if line.is_wrong)

    @property
    def verdict(self) -> str:
        """One sentence: whether the layout is accepted, and which predictions are off."""
        limit = self.priced_plan.request.usable_memory
        off = ", ".join(
            f"{line.figure} {'(none in the dry run)' if line.ratio is None else f'by {line.ratio - 1:+.0%}'}"
            for line in self.wrong
        )
        within = f"every figure within {TOLERANCE:.0%}"
        summary = f"off by more than {TOLERANCE:.0%}: {off}" if off else within
        if self.is_refused:
            over = (self.device_bytes - limit) / 1e9
            return f"rejected: the dry run needs {over:.1f} GB over the limit of {limit / 1e9:.1f} GB; {summary}."
        return f"accepted: {summary}."


def pp_ranks_to_run(priced: PricedPlan) -> tuple[int, ...]:
    """The pp ranks to dry-run: the first, the last, and the one predicted to be fullest."""
    memories = PlanPricer(priced.request).memory_by_pp_rank(priced.candidate)
    fullest = max(range(len(memories)), key=lambda pp_rank: memories[pp_rank].allocated)
    return tuple(sorted({0, fullest, len(memories) - 1}))


def verify_layout(priced: PricedPlan, run: DryRun) -> LayoutVerification:
    """Compare the predictions of a layout with the dry run of some of its ranks.

    A dry run runs compiled blocks eagerly, so the predictions of eager blocks are compared with it; of what they take
    more, the memory of the device has only the share that is predicted for compiled ones.
    """
    pricer, schedule = PlanPricer(priced.request), priced.candidate.schedule
    candidate = priced.candidate._replace(schedule=schedule._replace(compile=False))
    memories = pricer.memory_by_pp_rank(candidate)
    by_pp_rank = {trace.place["pp"]: trace for trace in run.traces}
    worst = max(by_pp_rank, key=lambda pp_rank: by_pp_rank[pp_rank].peak.total)
    trace = by_pp_rank[worst]
    peaks = tuple(
        FigureComparison(
            f"peak, pp rank {pp_rank}", "bytes", memories[pp_rank].allocated, by_pp_rank[pp_rank].peak.total
        )
        for pp_rank in sorted(by_pp_rank)
    )
    counts = pricer.counts(candidate, priced.placement, worst)
    compiled = pricer.memory_by_pp_rank(priced.candidate)[worst].allocated / memories[worst].allocated
    return LayoutVerification(
        priced_plan=priced,
        pp_rank=worst,
        rank=trace.rank,
        figures=(
            *_bytes(memories[worst], trace),
            FigureComparison("FLOPs of the step", "FLOPs", counts.flops, trace.flops),
            *_sent(counts.sent, trace, _along_all(priced, counts.sent)),
        ),
        pp_rank_peaks=peaks,
        device_bytes=memories[worst].device_bytes_for(trace.peak.total * compiled),
        seconds=sum(each.seconds for each in run.traces),
        notes=run.notes,
    )


def first_accepted(found: Sequence[LayoutVerification]) -> LayoutVerification | None:
    """The first layout that was not rejected."""
    return next((each for each in found if not each.is_refused), None)


def _bytes(memory: MemoryEstimate, trace: Trace) -> list[FigureComparison]:
    held: dict[str, int] = dict(zip(MEMORY_KINDS, trace.peak.held, strict=True))
    lines = []
    for name, (ours, theirs) in _GROUPS.items():
        formula, program = sum(getattr(memory, kind) for kind in ours), sum(held[kind] for kind in theirs)
        matters = abs(formula - program) > NEGLIGIBLE * trace.peak.total
        lines.append(FigureComparison(name, "bytes", formula, program, matters))
    return lines


def _along_all(priced: PricedPlan, formula: dict[str, float]) -> tuple[str, ...]:
    """Axes whose groups are all ranks: the dry run calls all of them `world`.

    Tokens that are sent once go through a group for every level, of which none is all ranks if there are several.
    """
    degrees = priced.candidate.degrees
    ranks = {axis: getattr(degrees, axis) for axis in formula} | {"shard": degrees.shard * degrees.cp}
    if priced.candidate.schedule.dispatch.deduplicated:
        ranks["ep"] = max(dict(priced.placement.group_shapes)["ep"])
    return tuple(axis for axis in formula if ranks[axis] == degrees.world)


def _sent(formula: dict[str, float], trace: Trace, along_all: tuple[str, ...]) -> list[FigureComparison]:
    """Bytes put into collectives by axis and level; receives are skipped, since another rank sent them."""
    joined = " and ".join(along_all) or "world"
    predicted: dict[str, float] = {}
    for axis, size in formula.items():
        name = joined if axis in along_all else axis
        predicted[name] = predicted.get(name, 0.0) + size
    dry_run: dict[str, float] = {}
    levels: dict[str, str] = {}
    for call in trace.collectives:
        if call.operation != "receive":
            name = joined if call.axes == "world" else call.axes.removeprefix("expert_")
            dry_run[name] = dry_run.get(name, 0.0) + call.total_payload
            levels.setdefault(name, call.level)
    total = sum(dry_run.values())
    lines = []
    for name in sorted({*predicted, *dry_run}, key=lambda axis: -dry_run.get(axis, 0.0)):
        first, second = predicted.get(name, 0.0), dry_run.get(name, 0.0)
        matters = abs(first - second) > NEGLIGIBLE * total
        if matters or name in predicted:
            where = f" ({levels[name]})" if levels.get(name) else ""
            lines.append(FigureComparison(f"sent along {name}{where}", "bytes", first, second, matters))
    return lines
