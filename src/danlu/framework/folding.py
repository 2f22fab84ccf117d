"""Layers that are like their neighbours, counted instead of run.

A rank with many layers of one kind is run twice with few: three of every run of layers, then four. What the fourth
adds is one layer's worth, at every place where a layer is passed. If the longer step without the added layer is the
shorter one, entry by entry, then further layers add the same again, and the whole step is written out from that.
Nothing is estimated: where the two steps do not agree, `NotAlikeError` says so, and the layers must be run.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from danlu.framework.optimiser_folding import fold_optimiser
from danlu.framework.step_record import StepRecord, Timeline
from danlu.framework.whereabouts import layers_named, renumbered, without_layer
from danlu.memory.timeline import Context
from danlu.parallel.pipeline import rank_stages
from danlu.spec.model import Model
from danlu.spec.plan import Plan
from danlu.spec.recipe import Recipe

SHORT, LONG = 3, 4
"""Layers of a run in the two steps that are compared: a first, a last, and one or two between."""

K = TypeVar("K", bound=Hashable)
Rows = NDArray[np.int64]


class NotAlikeError(RuntimeError):
    """Two steps differ by something else than a layer."""


@dataclass(frozen=True)
class Run:
    """Layers of one kind that follow each other on one stage."""

    first: int
    count: int
    short: int
    """Number of the first one in the short step."""
    long: int
    """And in the long step."""

    @property
    def copies(self) -> int:
        """How often the long step's added layer is there in the whole one."""
        return self.count - SHORT


@dataclass(frozen=True)
class Fold:
    """The two steps to be run, and how their layers stand for those of the whole."""

    short: tuple[Recipe, Plan]
    long: tuple[Recipe, Plan]
    runs: tuple[Run, ...]
    """Runs of layers that are longer in the long step."""
    run_of: dict[int, Run]
    """For the layers of a run in the long step, and for a part of the model with a single run, that run."""
    to_short: dict[int, int]
    """Numbers of the long step's layers in the short step; those that were added are missing."""
    to_whole: dict[int, int]
    """Numbers of the long step's layers in the whole; of one that was added, that of its first copy."""
    layers: int
    """Layers that need not be run."""


def find_fold(recipe: Recipe, plan: Plan, place: int) -> Fold | None:
    """How to fold the layers of the rank at `place` on the pipeline; None if running them all is no dearer."""
    model = recipe.model
    if recipe.precision.layers or not isinstance(model, Model):
        return None  # layers are chosen by number, and numbers would change; or nothing is known of a user's module
    mine = rank_stages(plan, place)
    stages = [_kinds(model, layers) for layers in plan.stage_layers(model.layers)]
    saved = [sum(max(0, stages[stage][kind] - LONG) for stage in mine) for kind in (0, 1)]
    kind = saved.index(max(saved))
    short, long = (_shortened(stages, mine, kind, most) for most in (SHORT, LONG))
    held, run = (sum(sum(counts[stage]) for stage in mine) for counts in (stages, long))
    if sum(sum(short[stage]) for stage in mine) + run >= held:
        return None
    runs: list[Run] = []
    run_of: dict[int, Run] = {}
    to_short: dict[int, int] = {}
    to_whole: dict[int, int] = {}
    for part, stage in enumerate(mine, start=1):
        for each in (0, 1):
            whole_at, short_at, long_at = (_first(counts, stage, each) for counts in (stages, short, long))
            added = long[stage][each] - short[stage][each]
            if added:
                runs.append(Run(whole_at, stages[stage][each], short_at, long_at))
                run_of |= dict.fromkeys([-1 - part, *range(long_at, long_at + LONG)], runs[-1])
            for position in range(long[stage][each]):
                last_ones = added and position > 1
                to_whole[long_at + position] = whole_at + position + (stages[stage][each] - LONG) * bool(last_ones)
                if not (added and position == 1):
                    to_short[long_at + position] = short_at + position - bool(last_ones)
    return Fold(
        short=_with_layers(recipe, model, plan, short),
        long=_with_layers(recipe, model, plan, long),
        runs=tuple(runs),
        run_of=run_of,
        to_short=to_short,
        to_whole=to_whole,
        layers=held - run,
    )


def fold(short: StepRecord, long: StepRecord, fold: Fold) -> tuple[StepRecord, Timeline]:
    """The whole step from the two that were run."""
    runs, more = len(fold.runs), sum(run.count - LONG for run in fold.runs)
    rows = _matched(short, long, fold)
    optimiser = fold_optimiser(short, long, runs, more)
    record = replace(
        long,
        operators=_more(short.operators, long.operators, runs, more),
        collectives=_more(short.collectives, long.collectives, runs, more),
        optimiser_operators=optimiser.operators,
        optimiser_collectives=optimiser.collectives,
        seconds=short.seconds + long.seconds,
    )
    entries = long.entries
    changes = (entries.changes + rows.more)[rows.source]
    passed = np.diff(entries.at, prepend=0)[rows.source].cumsum()
    context = _renamed(long, rows, fold)
    return record, Timeline(
        np.concatenate([changes, optimiser.changes]),
        np.concatenate([passed, record.operators.total() + optimiser.at]),
        lambda row: context(row) if row < len(changes) else ("optimiser", "", None),
    )


def _kinds(model: Model, layers: range) -> tuple[int, int]:
    """How many dense layers, and how many of experts; the dense ones come first."""
    experts = sum(model.is_moe_layer(layer) for layer in layers)
    return len(layers) - experts, experts


Counts = list[tuple[int, int]]
"""For every stage, its dense layers and its layers of experts."""


def _shortened(stages: Counts, mine: Sequence[int], kind: int, most: int) -> Counts:
    """At most `most` layers of one kind on this rank's stages, and a single one on each stage that is not its own."""
    counts: Counts = []
    for stage, (dense, experts) in enumerate(stages):
        if stage in mine:
            counts.append((min(dense, most), experts) if kind == 0 else (dense, min(experts, most)))
        else:
            counts.append((0, 1) if experts else (1, 0))
    return counts


def _first(counts: Counts, stage: int, kind: int) -> int:
    """Number of a stage's first layer of a kind."""
    return sum(map(sum, counts[:stage])) + (counts[stage][0] if kind else 0)


def _with_layers(recipe: Recipe, model: Model, plan: Plan, counts: Counts) -> tuple[Recipe, Plan]:
    changes: dict[str, object] = {"layers": sum(map(sum, counts))}
    if model.moe is not None:
        changes["moe"] = model.moe.model_copy(update={"dense_layers": sum(dense for dense, _ in counts)})
    layers = tuple(map(sum, counts)) if plan.degrees.pp > 1 else ()
    pipeline = plan.pipeline.model_copy(update={"layers": layers})
    return (
        recipe.model_copy(update={"model": model.model_copy(update=changes)}),
        plan.model_copy(update={"pipeline": pipeline}),
    )


@dataclass(frozen=True)
class _WholeRows:
    """Rows of the whole step before the optimiser's, as rows of the long one."""

    source: Rows
    layer: Rows
    """The layer of the whole that each belongs to, or -1."""
    more: Rows
    """For every row of the long step, the bytes that it has more in the whole.

    Not zero only outside the middle of a run: what is alive at the start, what is let go of for all layers at once.
    """


def _matched(short: StepRecord, long: StepRecord, fold: Fold) -> _WholeRows:
    """Prove that the long step is the short one with one more layer in every run, and write out the whole."""
    ends = [_optimiser_start(record) for record in (short, long)]
    added = {run.long + 1: run for run in fold.runs}
    layers = long.entries.layer[: ends[1]]
    kept = ~np.isin(layers, list(added))
    to_short = np.vectorize(lambda layer: fold.to_short.get(layer, layer), otypes=[np.int64])
    rows = np.flatnonzero(kept)
    ours = _compared(short, np.arange(ends[0]), short.entries.layer[: ends[0]])
    if not np.array_equal(ours, _compared(long, rows, to_short(layers[rows]))):
        raise NotAlikeError("the step with one more layer does other things than the one without")
    grown = np.zeros_like(long.entries.changes)
    grown[rows] = long.entries.changes[rows] - short.entries.changes[: ends[0]]
    if grown[np.isin(long.entries.layer, [run.long + 2 for run in fold.runs])].any():
        raise NotAlikeError("a layer between others needs more memory for there being one more")
    source: list[Rows] = []
    numbers: list[Rows] = []
    pieces = np.flatnonzero(np.diff(layers, prepend=-2))
    bounds = [*pieces.tolist(), len(layers)]
    for at, (start, end) in enumerate(pairwise(bounds)):
        layer = int(layers[start])
        piece, run = np.arange(start, end), added.get(layer)
        if run is None:
            source.append(piece)
            numbers.append(np.full(end - start, fold.to_whole.get(layer, -1)))
            continue
        around = [int(layers[bounds[at + step]]) if 0 <= at + step < len(pieces) else -1 for step in (-1, 1)]
        if sorted(around) != [layer - 1, layer + 1]:
            raise NotAlikeError(f"layer {run.first + 1} is not passed between its neighbours")
        first = run.first + 1
        order = range(first, first + run.copies)
        source.append(np.tile(piece, run.copies))
        numbers.append(np.repeat(list(order if around[0] < layer else reversed(order)), end - start))
    return _WholeRows(np.concatenate(source), np.concatenate(numbers), _continued(grown, long.entries.layer, fold))


def _compared(record: StepRecord, rows: Rows, layers: Rows) -> Rows:
    """What must be the same in both steps: rise or fall, operators in between, layer, phase, module and microbatch."""
    entries = record.entries
    contexts = [hash((phase, without_layer(module), microbatch)) for phase, module, microbatch in record.contexts]
    passed = np.diff(entries.at, prepend=0)[rows]
    rises = entries.changes[rows].sum(axis=1) > 0
    return np.column_stack([rises, passed, layers, np.array(contexts)[entries.context[rows]]])


def _optimiser_start(record: StepRecord) -> int:
    optimising = [phase == "optimiser" for phase, _, _ in record.contexts]
    found = np.flatnonzero(np.array(optimising)[record.entries.context])
    return int(found[0]) if len(found) else len(record.entries.at)


def _renamed(long: StepRecord, rows: _WholeRows, fold: Fold) -> Callable[[int], Context]:
    """What ran at a row of the whole, with the whole's numbers of layers."""

    def context(row: int) -> Context:
        source, layer = int(rows.source[row]), int(rows.layer[row])
        phase, module, microbatch = long.contexts[int(long.entries.context[source])]
        position = int(long.entries.layer[source])
        named = next(layers_named(module), None)
        if named is None:
            return phase, module, microbatch
        # A unit that is gathered ahead of time is a neighbour of the layer that runs.
        number = fold.to_whole.get(named, named) if layer < 0 else layer + named - position
        return phase, renumbered(module, number), microbatch

    return context


def _more(short: Counter[K], long: Counter[K], runs: int, more: int) -> Counter[K]:
    """Counts of the whole: what a layer adds is the difference of the two steps, the same for every run."""
    whole: Counter[K] = Counter()
    for key in short.keys() | long.keys():
        added, rest = divmod(long[key] - short[key], runs)
        if added < 0 or rest:
            raise NotAlikeError(f"{key} is called {short[key]} times with a layer less and {long[key]} times with it")
        whole[key] = long[key] + added * more
    return Counter({key: whole[key] for key in (*long, *(set(whole) - set(long)))})


def _continued(grown: Rows, layers: Rows, fold: Fold) -> Rows:
    """How much every row still grows, from what it grew by when every run got one layer more.

    A row that belongs to a run grows with it alone; the first one, what is alive at the start, with all of them.
    """
    more = np.zeros_like(grown)
    total, runs = sum(run.count - LONG for run in fold.runs), len(fold.runs)
    same = total == runs * (fold.runs[0].count - LONG)
    for row in np.flatnonzero(grown.any(axis=1)).tolist():
        run = fold.run_of.get(int(layers[row]))
        if same or run is not None:
            more[row] = grown[row] * ((run or fold.runs[0]).count - LONG)
        elif row == 0 and not (grown[row] % runs).any():
            more[row] = grown[row] // runs * total
        else:
            raise NotAlikeError("something grows with the layers, and it is not known with which of them")
    return more
