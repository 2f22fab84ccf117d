"""Why this layout: where its time goes, which level of the network holds it back, what speaks against others."""

from collections.abc import Iterator
from dataclasses import dataclass

from danlu.planner.places import Places
from danlu.planner.pricing import Pricing
from danlu.planner.question import RECOMPUTES, SCHEDULES, Question
from danlu.planner.search import Choice
from danlu.planner.space import Candidate, Space, Split, Work
from danlu.spec.plan import LOOPED_SCHEDULES

PARTS = {
    "linear": "matrix products",
    "attention": "attention",
    "elementwise": "norms, activations, residuals",
    "head": "embedding, head and loss",
    "recompute": "computed again",
    "waiting": "waiting for the host",
    "accumulate": "adding up gradients",
    "tensor": "tensor parallelism (tp)",
    "context": "context parallelism (cp)",
    "expert": "experts (ep)",
    "gather": "gathers and scatters of states (shard)",
    "gradients": "gradients of replicas (replicate)",
    "parameters": "parameters to replicas (replicate)",
    "transfer": "between stages (pp)",
    "bubble": "bubble of the pipeline",
    "optimizer": "optimiser",
    "stragglers": "waiting for the slowest chip",
    "other": "outside the model",
}
"""Parts of a step in words, in the order they are shown."""
TRAFFIC = ("tensor", "context", "expert", "gather", "gradients", "parameters", "transfer")
"""Parts that are exposed communication."""
NOTHING = 0.005
"""Share of a step below which a level does not hold it back."""


@dataclass(frozen=True)
class Hold:
    """What one level of the network costs a step."""

    level: str
    seconds: float
    """By which the step is shorter if the level costs nothing."""
    parts: dict[str, float]
    """The same by part of the step."""


@dataclass(frozen=True)
class Refusal:
    """Why a neighbour of a layout was not chosen."""

    change: str
    """The knob that was turned, with both values."""
    kind: str
    """`rule`, `bytes` or `seconds`."""
    reason: str
    remedy: str = ""
    """The smallest change that makes it fit, or what costs it the time."""


def holds(choice: Choice) -> list[Hold]:
    """What every level of the network costs, the costliest first."""
    pricing, memory = Pricing(choice.question), choice.prediction.memory
    found = []
    for index, level in enumerate(choice.question.cluster.levels):
        free = pricing.without(index).exact(choice.candidate, choice.place, memory)
        parts = {name: seconds - free.parts.get(name, 0.0) for name, seconds in choice.prediction.parts.items()}
        kept = {name: saved for name, saved in parts.items() if name in TRAFFIC and saved > 0}
        found.append(Hold(level.name, choice.seconds - free.seconds, kept))
    return sorted(found, key=lambda hold: -hold.seconds)


def bottleneck(choice: Choice) -> str:
    """The level of the network that holds a layout back most, or `compute`."""
    worst = holds(choice)[0]
    return worst.level if worst.seconds > NOTHING * choice.seconds else "compute"


class Judge:
    """Says what speaks against single layouts of a question."""

    def __init__(self, question: Question) -> None:
        self.question = question
        self.space, self.pricing, self.places = Space(question), Pricing(question), Places(question.cluster)

    def refusals(self, chosen: Choice) -> list[Refusal]:
        """For every layout that differs in one knob, what speaks against it."""
        found = [self._against(chosen, change, other) for change, other in neighbours(chosen.candidate, self.question)]
        return [refusal for refusal in found if refusal is not None]

    def _against(self, chosen: Choice, change: str, other: Candidate) -> Refusal | None:
        problem = self.problem(other)
        if problem:
            return Refusal(change, "rule", problem)
        taken, limit = self.pricing.bytes(other).device, self.question.memory
        if taken > limit:
            reason = f"{taken / 1e9:.1f} GB on the fullest chip, {(taken - limit) / 1e9:.1f} GB more than fit"
            return Refusal(change, "bytes", reason, self.remedy(other))
        best = self._priced(other)
        if best is None:
            return Refusal(change, "rule", "its axes find no place on the levels of the network")
        more = best.seconds - chosen.seconds
        grown = {name: best.prediction.parts.get(name, 0.0) - chosen.prediction.parts.get(name, 0.0) for name in PARTS}
        part = max(grown, key=lambda name: grown[name])
        return Refusal(
            change,
            "seconds",
            f"{best.seconds:.3f} s a step, {more:+.3f} s ({more / chosen.seconds:+.1%})",
            f"{PARTS[part]}: {grown[part]:+.3f} s" if grown[part] > 0 else "",
        )

    def problem(self, candidate: Candidate) -> str:
        """What the rules say against a layout; empty if nothing."""
        core, work, split = candidate
        held, rest = divmod(self.question.recipe.batch.sequences, core.data)
        if core.pp * core.cp * core.tp * core.data != self.question.chips:
            return f"its degrees do not multiply to {self.question.chips:,} chips"
        if rest or held % core.microbatches or core.data % split.shard:
            return f"the {self.question.recipe.batch.sequences:,} sequences of a batch do not divide"
        found = (
            self.space.shape_problem(core.tp, core.cp, core.ep, split.shard)
            or self.space.stage_problem(core.pp, work, split.reshards)
            or self.space.fill_problem(core.pp, work.schedule, work.virtual, core.microbatches)
        )
        return f"`{found.key}` {found.message}" if found else ""

    def remedy(self, candidate: Candidate) -> str:
        """The smallest change that makes a layout fit."""
        for change, other in neighbours(candidate, self.question, only_smaller=True):
            if not self.problem(other) and self.pricing.bytes(other).device <= self.question.memory:
                return f"fits with {change}"
        return "no single change makes it fit"

    def _priced(self, candidate: Candidate) -> Choice | None:
        memory = self.pricing.bytes(candidate)
        choices = [
            Choice(
                question=self.question,
                candidate=candidate,
                place=place,
                prediction=self.pricing.exact(candidate, place, memory),
            )
            for place in self.places.of(candidate.degrees)
        ]
        return min(choices, key=lambda choice: choice.seconds, default=None)


def neighbours(
    candidate: Candidate, question: Question, *, only_smaller: bool = False
) -> Iterator[tuple[str, Candidate]]:
    """Layouts that differ in one knob, with the change in words; with `only_smaller` those that may take fewer bytes.

    A degree that doubles or halves takes ranks from the data-parallel axes or gives them, and sequences of a microbatch
    stay as many.
    """
    core, work, split = candidate
    lighter = RECOMPUTES[RECOMPUTES.index(work.recompute) + 1 :] if only_smaller else RECOMPUTES
    for recompute in lighter:
        if recompute != work.recompute:
            changed = work._replace(recompute=recompute)  # type: ignore[arg-type]
            yield f"recompute {work.recompute} → {recompute}", candidate._replace(work=changed)
    for times in (2, 0.5):
        number = core.microbatches * times
        if number >= 1 and number == int(number) and not (only_smaller and times < 1):
            size = question.recipe.batch.sequences / core.data / core.microbatches
            changed_core = core._replace(microbatches=int(number))
            yield f"microbatch {size:g} → {size / times:g}", candidate._replace(core=changed_core)
    if not only_smaller or not split.reshards:
        word = "reshard" if not split.reshards else "no reshard"
        yield word, candidate._replace(split=split._replace(reshards=not split.reshards))
    yield from _split_neighbours(candidate, only_smaller)
    for axis in ("tp", "cp", "pp", "ep"):
        yield from _degree_neighbours(candidate, axis, only_smaller)
    if work.layers:
        yield "layers as even as possible", candidate._replace(work=work._replace(layers=()))
    if core.pp > 1 and not only_smaller:
        for schedule in SCHEDULES:
            if schedule != work.schedule:
                virtual = max(2, work.virtual) if schedule in LOOPED_SCHEDULES else 1
                changed = Work(schedule, 2 if schedule == "zbv" else virtual, work.recompute)  # type: ignore[arg-type]
                yield f"schedule {work.schedule} → {schedule}", candidate._replace(work=changed)


def _split_neighbours(candidate: Candidate, only_smaller: bool) -> Iterator[tuple[str, Candidate]]:
    split = candidate.split
    if split.replicate % 2 == 0:
        other = split._replace(replicate=split.replicate // 2, shard=split.shard * 2)
        yield f"shard {split.shard} → {other.shard}", candidate._replace(split=other)
    if split.shard % 2 == 0 and not only_smaller:
        other = split._replace(replicate=split.replicate * 2, shard=split.shard // 2)
        yield f"shard {split.shard} → {other.shard}", candidate._replace(split=other)


def _degree_neighbours(candidate: Candidate, axis: str, only_smaller: bool) -> Iterator[tuple[str, Candidate]]:
    core, work, split = candidate
    now = getattr(core, axis)
    if axis == "ep":
        for then in (now * 2, now // 2):
            if then and (now % 2 == 0 or then > now) and not (only_smaller and then < now):
                yield f"ep {now} → {then}", candidate._replace(core=core._replace(ep=then))
        return
    if axis == "pp":
        work = work._replace(layers=())  # other stages hold other layers
    if core.data % 2 == 0:
        less = Split(split.replicate, split.shard // 2, split.reshards)
        if split.shard % 2:
            less = Split(split.replicate // 2, split.shard, split.reshards)
        more = core._replace(**{axis: now * 2}, data=core.data // 2, microbatches=core.microbatches * 2)
        yield f"{axis} {now} → {now * 2}", Candidate(more, work, less)
    if now % 2 == 0 and not only_smaller and core.microbatches % 2 == 0:
        fewer = core._replace(**{axis: now // 2}, data=core.data * 2, microbatches=core.microbatches // 2)
        changed = Work("1f1b", 1, work.recompute) if axis == "pp" and now == 2 else work
        wider = Split(split.replicate, split.shard * 2, split.reshards)
        yield f"{axis} {now} → {now // 2}", Candidate(fewer, changed, wider)
