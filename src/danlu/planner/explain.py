"""Explains a layout: where its time goes, which network level is its bottleneck, why its neighbors lose."""

from collections.abc import Iterator
from dataclasses import dataclass

from danlu.cost.software import ALL_AT_ONCE
from danlu.planner.pricing import PlanPricer, PricedPlan
from danlu.planner.request import DISPATCHES, RECOMPUTE_MODES, SEARCHED_SCHEDULES, PlanRequest
from danlu.planner.search_space import Candidate, SearchSpace, context_kind
from danlu.planner.ties import tie_limit
from danlu.spec.plan import LOOPED_SCHEDULES
from danlu.spec.problem import Problem

PART_LABELS = {
    "linear": "matmuls",
    "attention": "attention",
    "elementwise": "norms, activations, residuals",
    "head": "embedding, head and loss",
    "recompute": "recompute",
    "waiting": "kernel launch wait",
    "accumulate": "gradient accumulation",
    "tensor": "tensor parallelism (tp)",
    "context": "context parallelism (cp)",
    "expert": "experts (ep)",
    "gather": "FSDP all-gather/reduce-scatter (shard)",
    "gradients": "gradients of replicas (replicate)",
    "parameters": "parameters to replicas (replicate)",
    "transfer": "between stages (pp)",
    "bubble": "pipeline bubble",
    "optimizer": "optimizer",
    "orthogonalization": "Newton–Schulz iterations (Muon)",
    "exchange": "matrices to their ranks and back (Muon)",
    "stragglers": "stragglers",
    "other": "other (batch, loss, logging)",
}
"""Labels of the parts of a step, in display order."""
COMMUNICATION_PARTS = ("tensor", "context", "expert", "gather", "gradients", "parameters", "transfer", "exchange")
"""Parts that are exposed communication."""
NEGLIGIBLE_SHARE = 0.005
"""Share of a step below which a level is no bottleneck."""


@dataclass(frozen=True)
class LevelCost:
    """What one network level costs per step."""

    level: str
    seconds: float
    """Time saved if the level were free."""
    parts: dict[str, float]
    """The same by part of the step."""


@dataclass(frozen=True)
class Rejection:
    """Why a neighbor of a layout was not chosen."""

    change: str
    """The knob that differs, with both values."""
    kind: str
    """`rule`, `bytes`, `seconds`, or `tie` if the model cannot tell which is faster."""
    reason: str
    remedy: str = ""
    """What satisfies the rule, the smallest change that makes it fit, or what costs it the time."""


def level_costs(priced: PricedPlan) -> list[LevelCost]:
    """What every level of the network costs, the costliest first."""
    found = []
    for index, level in enumerate(priced.request.cluster.levels):
        pricer = PlanPricer(priced.request, free_level=index)
        free = pricer.price(priced.candidate, priced.placement, priced.prediction.memory).prediction
        parts = {name: seconds - free.parts.get(name, 0.0) for name, seconds in priced.prediction.parts.items()}
        communication = {name: saved for name, saved in parts.items() if name in COMMUNICATION_PARTS and saved > 0}
        found.append(LevelCost(level.name, priced.seconds - free.seconds, communication))
    return sorted(found, key=lambda cost: -cost.seconds)


def bottleneck(priced: PricedPlan) -> str:
    """The network level that costs a layout most, or `compute`."""
    worst = level_costs(priced)[0]
    return worst.level if worst.seconds > NEGLIGIBLE_SHARE * priced.seconds else "compute"


class Explainer:
    """Explains why other layouts of a request lose."""

    def __init__(self, request: PlanRequest) -> None:
        self.request = request
        self.space, self.pricer = SearchSpace(request), PlanPricer(request)

    def rejections(self, chosen: PricedPlan, fastest: float | None = None) -> list[Rejection]:
        """For every layout that differs in one knob, why it was not chosen.

        `fastest` is the time of the fastest layout, if that is not the chosen one: a tie is measured from it.
        """
        limit = tie_limit(chosen.seconds if fastest is None else fastest)
        return [
            self._against(chosen, change, other, limit) for change, other in neighbors(chosen.candidate, self.request)
        ]

    def _against(self, chosen: PricedPlan, change: str, other: Candidate, tied_until: float) -> Rejection:
        wrong = self.rule_problem(other)
        if wrong:
            return Rejection(change, "rule", f"`{wrong.key}` {wrong.message}", wrong.suggestion)
        taken, limit = self.pricer.memory(other).device_bytes, self.request.usable_memory
        if taken > limit:
            reason = f"{taken / 1e9:.1f} GB on the fullest chip, {(taken - limit) / 1e9:.1f} GB more than fit"
            return Rejection(change, "bytes", reason, self.suggest_fix(other))
        best = self.pricer.price_best_placement(other)
        if best is None:
            return Rejection(change, "rule", "its axes cannot be placed on the network levels")
        more = best.seconds - chosen.seconds
        grown = {
            name: best.prediction.parts.get(name, 0.0) - chosen.prediction.parts.get(name, 0.0) for name in PART_LABELS
        }
        part = max(grown, key=lambda name: grown[name])
        # The same degrees share most of their error: their order can be trusted, however close they are.
        is_tie = best.seconds <= tied_until and other.degrees != chosen.candidate.degrees
        reason = f"{best.seconds:.3f} s per step, {more:+.3f} s ({more / chosen.seconds:+.1%})"
        return Rejection(
            change,
            "tie" if is_tie else "seconds",
            f"{reason}: a tie" if is_tie else reason,
            f"{PART_LABELS[part]}: {grown[part]:+.3f} s" if grown[part] > 0 else "",
        )

    def rule_problem(self, candidate: Candidate) -> Problem | None:
        """The first problem that the rules of `danlu check` find with a layout."""
        shape, schedule, data = candidate
        return (
            self.space.shape_problem(shape.tp, shape.cp, shape.ep, data.shard, shape.ring)
            or self.space.stage_problem(shape.pp, schedule, data.reshard_after_forward)
            or self.space.batch_problem(candidate)
        )

    def suggest_fix(self, candidate: Candidate) -> str:
        """The smallest change that makes a layout fit."""
        for change, other in neighbors(candidate, self.request, only_smaller=True):
            if not self.rule_problem(other) and self.pricer.memory(other).device_bytes <= self.request.usable_memory:
                return f"fits with {change}"
        return "no single change makes it fit"


def neighbors(
    candidate: Candidate, request: PlanRequest, *, only_smaller: bool = False
) -> Iterator[tuple[str, Candidate]]:
    """Layouts that differ in one knob, with a text for the change; `only_smaller`: those that may take less memory.

    A degree that doubles or halves takes ranks from the data-parallel axes or returns them; the microbatch size stays.
    """
    shape, schedule, data = candidate
    known = RECOMPUTE_MODES.index(schedule.recompute) if schedule.recompute in RECOMPUTE_MODES else 0
    lighter = RECOMPUTE_MODES[known + 1 :] if only_smaller else RECOMPUTE_MODES
    for recompute in lighter:
        if recompute != schedule.recompute:
            changed = schedule._replace(recompute=recompute, regather_inputs=False)  # type: ignore[arg-type]
            yield f"recompute {schedule.recompute} → {recompute}", candidate._replace(schedule=changed)
    for times in (2, 0.5):
        number = shape.microbatches * times
        if number >= 1 and number == int(number) and not (only_smaller and times < 1):
            size = request.recipe.batch.sequences / shape.dp / shape.microbatches
            changed_shape = shape._replace(microbatches=int(number))
            yield f"microbatch {size:g} → {size / times:g}", candidate._replace(shape=changed_shape)
    if not only_smaller or not data.reshard_after_forward:
        word = "reshard" if not data.reshard_after_forward else "no reshard"
        yield word, candidate._replace(data=data._replace(reshard_after_forward=not data.reshard_after_forward))
    if shape.tp > 1 and not (only_smaller and schedule.regather_inputs):
        word = "keep gathered inputs" if schedule.regather_inputs else "regather inputs"
        changed = schedule._replace(regather_inputs=not schedule.regather_inputs)
        yield word, candidate._replace(schedule=changed)
    if shape.ep > 1 and not only_smaller:
        for dispatch in DISPATCHES:
            if dispatch != schedule.dispatch:
                words = f"dispatch {schedule.dispatch.words} → {dispatch.words}"
                yield words, candidate._replace(schedule=schedule._replace(dispatch=dispatch))
    if shape.cp > 1:
        words = f"context {context_kind(shape.ring)} → {context_kind(not shape.ring)}"
        yield words, candidate._replace(shape=shape._replace(ring=not shape.ring))
    yield from _data_neighbors(candidate, only_smaller)
    for axis in ("tp", "cp", "pp", "ep"):
        yield from _degree_neighbors(candidate, axis, only_smaller)
    if schedule.stage_layers:
        yield "layers as even as possible", candidate._replace(schedule=schedule._replace(stage_layers=()))
    if shape.pp > 1 and not only_smaller:
        for name in SEARCHED_SCHEDULES:
            if name != schedule.schedule:
                virtual = max(2, schedule.stages_per_rank) if name in LOOPED_SCHEDULES else 1
                stages = 2 if name == "zbv" else virtual
                changed = schedule._replace(schedule=name, stages_per_rank=stages, stage_layers=())  # type: ignore[arg-type]
                yield f"schedule {schedule.schedule} → {name}", candidate._replace(schedule=changed)


def _data_neighbors(candidate: Candidate, only_smaller: bool) -> Iterator[tuple[str, Candidate]]:
    data = candidate.data
    if data.replicate % 2 == 0:
        other = data._replace(replicate=data.replicate // 2, shard=data.shard * 2)
        yield f"shard {data.shard} → {other.shard}", candidate._replace(data=other)
    if data.shard % 2 == 0 and not only_smaller:
        other = data._replace(replicate=data.replicate * 2, shard=data.shard // 2)
        yield f"shard {data.shard} → {other.shard}", candidate._replace(data=other)


def _degree_neighbors(candidate: Candidate, axis: str, only_smaller: bool) -> Iterator[tuple[str, Candidate]]:
    shape, schedule, data = candidate
    now = getattr(shape, axis)
    if axis == "ep":
        for then in (now * 2, now // 2):
            if then and (now % 2 == 0 or then > now) and not (only_smaller and then < now):
                changed = schedule._replace(dispatch=ALL_AT_ONCE) if then == 1 else schedule
                yield f"ep {now} → {then}", Candidate(shape._replace(ep=then), changed, data)
        return
    if axis == "pp":
        schedule = schedule._replace(stage_layers=())  # other stages hold other layers
    if shape.dp % 2 == 0:
        halved = "replicate" if data.shard % 2 else "shard"
        less = data._replace(**{halved: getattr(data, halved) // 2})
        more = shape._replace(**{axis: now * 2}, dp=shape.dp // 2, microbatches=shape.microbatches * 2)
        yield f"{axis} {now} → {now * 2}", Candidate(more, schedule, less)
    if now % 2 == 0 and not only_smaller and shape.microbatches % 2 == 0:
        fewer = shape._replace(**{axis: now // 2}, dp=shape.dp * 2, microbatches=shape.microbatches // 2)
        fewer = fewer._replace(ring=shape.ring and fewer.cp > 1)
        changed = schedule._replace(regather_inputs=schedule.regather_inputs and fewer.tp > 1)
        if axis == "pp" and now == 2:
            changed = changed._replace(schedule="1f1b", stages_per_rank=1)
        yield f"{axis} {now} → {now // 2}", Candidate(fewer, changed, data._replace(shard=data.shard * 2))
