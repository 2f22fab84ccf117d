"""Layers equal to their neighbors, extrapolated instead of run.

A rank with many layers of one kind is run twice with few: three of every run of layers, then four. The difference is
one layer's contribution, wherever a layer is passed. If the longer step without the added layer is the shorter one,
row by row, then every further layer adds the same again, and the full step is derived from that. Nothing is
estimated: where the two steps do not agree, `LayerMismatchError` is raised, and the layers must be run.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from danlu.dryrun.memory_timeline import StepContext
from danlu.dryrun.module_tracker import layer_numbers, mask_layer_numbers, with_layer_number
from danlu.dryrun.optimizer_extrapolation import OptimizerPhase, extrapolate_optimizer
from danlu.dryrun.step_record import MemoryTimeline, StepRecord
from danlu.spec.model import Model
from danlu.spec.plan import Plan
from danlu.spec.recipe import Recipe
from danlu.spec.recompute import RecomputeLayers

SHORT_RUN, LONG_RUN = 3, 4
"""Layers of a run in the two steps that are compared: a first, a last, and one or two between."""

K = TypeVar("K", bound=Hashable)
Rows = NDArray[np.int64]


class LayerMismatchError(RuntimeError):
    """Two steps differ by something other than a layer."""


@dataclass(frozen=True)
class LayerRun:
    """Consecutive layers of one kind on one stage."""

    first: int
    count: int
    short: int
    """Index of the first one in the short step."""
    long: int
    """And in the long step."""

    @property
    def copies(self) -> int:
        """How often the full step contains the long step's added layer."""
        return self.count - SHORT_RUN


@dataclass(frozen=True)
class LayerExtrapolation:
    """The two steps to be run, and how their layers map to those of the full step."""

    short: tuple[Recipe, Plan]
    long: tuple[Recipe, Plan]
    runs: tuple[LayerRun, ...]
    """Runs of layers that are longer in the long step."""
    run_by_layer: dict[int, LayerRun]
    """For the layers of a run in the long step, and for a stage module with a single run, that run."""
    to_short: dict[int, int]
    """Indices of the long step's layers in the short step; added layers are missing."""
    to_full: dict[int, int]
    """Indices of the long step's layers in the full step; for an added layer, that of its first copy."""
    skipped_layers: int
    """Layers that need not be run."""


def find_extrapolation(recipe: Recipe, plan: Plan, pp_rank: int) -> LayerExtrapolation | None:
    """How to extrapolate the layers of pipeline rank `pp_rank`; None if running them all costs no more."""
    model = recipe.model
    # Layers are chosen by index, and indices would change; or a custom model, of which nothing is known.
    if recipe.precision.layers or isinstance(plan.recompute, RecomputeLayers) or not isinstance(model, Model):
        return None
    if model.mixes_windows:
        return None
    mine = plan.stages_of_rank(pp_rank)
    stages = [_kinds(model, layers) for layers in plan.stage_layers(model.layers)]
    saved = [sum(max(0, stages[stage][kind] - LONG_RUN) for stage in mine) for kind in (0, 1)]
    kind = saved.index(max(saved))
    short, long = (_shortened(stages, mine, kind, most) for most in (SHORT_RUN, LONG_RUN))
    held, run = (sum(sum(counts[stage]) for stage in mine) for counts in (stages, long))
    if sum(sum(short[stage]) for stage in mine) + run >= held:
        return None
    runs: list[LayerRun] = []
    run_by_layer: dict[int, LayerRun] = {}
    to_short: dict[int, int] = {}
    to_full: dict[int, int] = {}
    for module_number, stage in enumerate(mine, start=1):
        for each in (0, 1):
            full_at, short_at, long_at = (_first(counts, stage, each) for counts in (stages, short, long))
            added = long[stage][each] - short[stage][each]
            if added:
                runs.append(LayerRun(full_at, stages[stage][each], short_at, long_at))
                run_by_layer |= dict.fromkeys([-1 - module_number, *range(long_at, long_at + LONG_RUN)], runs[-1])
            for position in range(long[stage][each]):
                last_ones = added and position > 1
                to_full[long_at + position] = full_at + position + (stages[stage][each] - LONG_RUN) * bool(last_ones)
                if not (added and position == 1):
                    to_short[long_at + position] = short_at + position - bool(last_ones)
    return LayerExtrapolation(
        short=_with_layers(recipe, model, plan, short),
        long=_with_layers(recipe, model, plan, long),
        runs=tuple(runs),
        run_by_layer=run_by_layer,
        to_short=to_short,
        to_full=to_full,
        skipped_layers=held - run,
    )


def extrapolate_step(
    short: StepRecord, long: StepRecord, extrapolation: LayerExtrapolation, optimizer: OptimizerPhase | None = None
) -> tuple[StepRecord, MemoryTimeline]:
    """The full step from the two that were run, and from its `optimizer` phase if that was run by itself."""
    runs, more = len(extrapolation.runs), sum(run.count - LONG_RUN for run in extrapolation.runs)
    rows = _match_rows(short, long, extrapolation)
    optimizer = optimizer or extrapolate_optimizer(short, long, runs, more)
    record = replace(
        long,
        operators=_extrapolate_counts(short.operators, long.operators, runs, more),
        collectives=_extrapolate_counts(short.collectives, long.collectives, runs, more),
        optimizer_operators=optimizer.operators,
        optimizer_collectives=optimizer.collectives,
        seconds=short.seconds + long.seconds,
    )
    entries = long.entries
    changes = (entries.changes + rows.more)[rows.source]
    passed = np.diff(entries.operator_index, prepend=0)[rows.source].cumsum()
    context = _renamed(long, rows, extrapolation)
    return record, MemoryTimeline(
        np.concatenate([changes, optimizer.changes]),
        np.concatenate([passed, record.operators.total() + optimizer.at]),
        lambda row: context(row) if row < len(changes) else ("optimizer", "", None),
    )


def _kinds(model: Model, layers: range) -> tuple[int, int]:
    """How many dense layers, and how many MoE layers; the dense ones come first."""
    experts = sum(model.is_moe_layer(layer) for layer in layers)
    return len(layers) - experts, experts


Counts = list[tuple[int, int]]
"""For every stage, its dense layers and its MoE layers."""


def _shortened(stages: Counts, mine: Sequence[int], kind: int, most: int) -> Counts:
    """At most `most` layers of one kind on this rank's stages, and a single one on each stage of another rank."""
    counts: Counts = []
    for stage, (dense, experts) in enumerate(stages):
        if stage in mine:
            counts.append((min(dense, most), experts) if kind == 0 else (dense, min(experts, most)))
        else:
            counts.append((0, 1) if experts else (1, 0))
    return counts


def _first(counts: Counts, stage: int, kind: int) -> int:
    """Index of a stage's first layer of a kind."""
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
class _FullStepRows:
    """Rows of the full step before the optimizer's, as rows of the long one."""

    source: Rows
    layer: Rows
    """The layer of the full step that each belongs to, or -1."""
    more: Rows
    """For every row of the long step, the bytes that it has more in the full step.

    Nonzero only outside the middle of a run: what is live at the start, what is freed for all layers at once.
    """


def _match_rows(short: StepRecord, long: StepRecord, extrapolation: LayerExtrapolation) -> _FullStepRows:
    """Verify that the long step is the short one with one more layer in every run, and derive the full step."""
    ends = [_optimizer_start(record) for record in (short, long)]
    added = {run.long + 1: run for run in extrapolation.runs}
    layers = long.entries.layer[: ends[1]]
    kept = ~np.isin(layers, list(added))
    to_short = np.vectorize(lambda layer: extrapolation.to_short.get(layer, layer), otypes=[np.int64])
    rows = np.flatnonzero(kept)
    ours = _comparison_rows(short, np.arange(ends[0]), short.entries.layer[: ends[0]])
    if not np.array_equal(ours, _comparison_rows(long, rows, to_short(layers[rows]))):
        raise LayerMismatchError("one more layer changes the rest of the step")
    grown = np.zeros_like(long.entries.changes)
    grown[rows] = long.entries.changes[rows] - short.entries.changes[: ends[0]]
    if grown[np.isin(long.entries.layer, [run.long + 2 for run in extrapolation.runs])].any():
        raise LayerMismatchError("one more layer changes the memory of the layers between")
    source: list[Rows] = []
    numbers: list[Rows] = []
    pieces = np.flatnonzero(np.diff(layers, prepend=-2))
    bounds = [*pieces.tolist(), len(layers)]
    for at, (start, end) in enumerate(pairwise(bounds)):
        layer = int(layers[start])
        piece, run = np.arange(start, end), added.get(layer)
        if run is None:
            source.append(piece)
            numbers.append(np.full(end - start, extrapolation.to_full.get(layer, -1)))
            continue
        around = [int(layers[bounds[at + step]]) if 0 <= at + step < len(pieces) else -1 for step in (-1, 1)]
        if sorted(around) != [layer - 1, layer + 1]:
            raise LayerMismatchError(f"layer {run.first + 1} is not passed between its neighbors")
        first = run.first + 1
        order = range(first, first + run.copies)
        source.append(np.tile(piece, run.copies))
        numbers.append(np.repeat(list(order if around[0] < layer else reversed(order)), end - start))
    return _FullStepRows(
        np.concatenate(source), np.concatenate(numbers), _extrapolate_growth(grown, long.entries.layer, extrapolation)
    )


def _comparison_rows(record: StepRecord, rows: Rows, layers: Rows) -> Rows:
    """What must be equal in both steps: sign of a change, operators in between, layer, phase, module and microbatch."""
    entries = record.entries
    contexts = [hash((phase, mask_layer_numbers(module), microbatch)) for phase, module, microbatch in record.contexts]
    passed = np.diff(entries.operator_index, prepend=0)[rows]
    rises = entries.changes[rows].sum(axis=1) > 0
    return np.column_stack([rises, passed, layers, np.array(contexts)[entries.context[rows]]])


def _optimizer_start(record: StepRecord) -> int:
    in_optimizer = [phase == "optimizer" for phase, _, _ in record.contexts]
    found = np.flatnonzero(np.array(in_optimizer)[record.entries.context])
    return int(found[0]) if len(found) else len(record.entries.operator_index)


def _renamed(long: StepRecord, rows: _FullStepRows, extrapolation: LayerExtrapolation) -> Callable[[int], StepContext]:
    """What ran at a row of the full step, with the full step's layer indices."""

    def context(row: int) -> StepContext:
        source, layer = int(rows.source[row]), int(rows.layer[row])
        phase, module, microbatch = long.contexts[int(long.entries.context[source])]
        position = int(long.entries.layer[source])
        named = next(layer_numbers(module), None)
        if named is None:
            return phase, module, microbatch
        # A unit that is prefetched is a neighbor of the layer that runs.
        number = extrapolation.to_full.get(named, named) if layer < 0 else layer + named - position
        return phase, with_layer_number(module, number), microbatch

    return context


def _extrapolate_counts(short: Counter[K], long: Counter[K], runs: int, more: int) -> Counter[K]:
    """Counts of the full step: a layer adds the difference of the two steps, the same for every run."""
    full: Counter[K] = Counter()
    for key in short.keys() | long.keys():
        added, rest = divmod(long[key] - short[key], runs)
        if added < 0 or rest:
            raise LayerMismatchError(
                f"{key} is called {short[key]} times without the added layer and {long[key]} times with it"
            )
        full[key] = long[key] + added * more
    return Counter({key: full[key] for key in (*long, *(set(full) - set(long)))})


def _extrapolate_growth(grown: Rows, layers: Rows, extrapolation: LayerExtrapolation) -> Rows:
    """How much every row still grows, from its growth when every run got one more layer.

    A row that belongs to a run grows with that run alone; the first row, what is live at the start, with all of them.
    """
    more = np.zeros_like(grown)
    total, runs = sum(run.count - LONG_RUN for run in extrapolation.runs), len(extrapolation.runs)
    same = total == runs * (extrapolation.runs[0].count - LONG_RUN)
    for row in np.flatnonzero(grown.any(axis=1)).tolist():
        run = extrapolation.run_by_layer.get(int(layers[row]))
        if same or run is not None:
            more[row] = grown[row] * ((run or extrapolation.runs[0]).count - LONG_RUN)
        elif row == 0 and not (grown[row] % runs).any():
            more[row] = grown[row] // runs * total
        else:
            raise LayerMismatchError("memory grows with the layers, but not clearly with which of them")
    return more
