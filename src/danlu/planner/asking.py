"""Questions about a question: another machine, fewer chips, a deadline, a longer sequence, the least memory."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from pydantic import ValidationError

from danlu.planner.goodput import goodput
from danlu.planner.pricing import Pricing
from danlu.planner.question import Question, QuestionError
from danlu.planner.search import Answer, Choice, in_best_place
from danlu.planner.space import Candidate, Space
from danlu.spec.cluster import Cluster
from danlu.spec.problem import nearest

Searching = Callable[[Question, int], Answer]
"""`search` with its progress shown."""


def changed(question: Question, change: str) -> Question:
    """The question on another machine or batch: `fabric.bandwidth=2x`, `chip.memory=141 GB`, `batch.length=2x`.

    The first part is a level of the network, `chip` or `batch`; a value is a factor with an `x`, or what a file would
    say.
    """
    setting, _, value = change.partition("=")
    where, _, name = setting.strip().partition(".")
    if not value or not name:
        raise QuestionError(f'--what-if: "{change}" must read like fabric.bandwidth=2x or chip.memory=141 GB')
    cluster = question.cluster
    levels = [level.name for level in cluster.levels]
    if where == "batch":
        batch = _set(question.recipe.batch.model_dump(), name, value.strip(), change)
        recipe = question.recipe.model_copy(update={"batch": type(question.recipe.batch).model_validate(batch)})
        return replace(question, recipe=recipe)
    values = cluster.model_dump(mode="python")
    if where == "chip":
        values["chip"] = _set(values["chip"], name, value.strip(), change)
    elif where in levels:
        index = levels.index(where)
        values["levels"] = [
            _set(level, name, value.strip(), change) if place == index else level
            for place, level in enumerate(values["levels"])
        ]
    else:
        raise QuestionError(
            f'--what-if: "{where}" is not a part to change: {nearest(where, ["chip", "batch", *levels])}'
        )
    try:
        machine = Cluster.model_validate(values)
    except ValidationError as error:
        raise QuestionError(f"--what-if: {change}: {error.errors()[0]['msg']}") from None
    return replace(question, cluster=machine, chips=min(question.chips, machine.chips))


def _set(values: dict[str, Any], name: str, value: str, change: str) -> dict[str, Any]:
    if name not in values:
        raise QuestionError(f'--what-if: "{change}": no setting {name}: {nearest(name, list(values))}')
    now = values[name]
    if value.endswith("x"):
        try:
            factor = float(value[:-1])
        except ValueError:
            raise QuestionError(f'--what-if: "{change}": {value} is not a factor such as 2x') from None
        if isinstance(now, dict):
            return values | {name: {key: one * factor for key, one in now.items()}}
        return values | {name: round(now * factor) if isinstance(now, int) else now * factor}
    return values | {name: int(value) if value.isdecimal() else value}


@dataclass(frozen=True)
class Deadline:
    """How many chips a wanted time takes."""

    tokens: float
    days: float
    tried: tuple[tuple[int, float | None], ...]
    """Chips, and the days they take; None where nothing fits."""
    answer: Answer | None
    """Of the fewest chips that are in time."""


def days_of(choice: Choice, tokens: float, mtbf: float | None = None) -> float:
    """Days that so many tokens take, with failures where the cluster tells of them."""
    kept = goodput(choice.question, mtbf)
    return tokens / (choice.tokens_per_second * (kept.share if kept else 1.0)) / 86400


def chips_for(
    question: Question, tokens: float, days: float, searching: Searching, mtbf: float | None = None
) -> Deadline:
    """The fewest chips, whole nodes in powers of two or all there are, that train so many tokens in so many days."""
    per_node, most = question.cluster.chips_per_node, question.chips
    counts = sorted({most, *(per_node * 2**power for power in range(most.bit_length()) if per_node * 2**power <= most)})
    tried: dict[int, float | None] = {}
    found: Answer | None = None
    low, high = 0, len(counts)
    while low < high:
        middle = (low + high) // 2
        answer = searching(replace(question, chips=counts[middle]), 1)
        tried[counts[middle]] = days_of(answer.best[0], tokens, mtbf) if answer.best else None
        taken = tried[counts[middle]]
        if taken is not None and taken <= days:
            found, high = answer, middle
        else:
            low = middle + 1
    return Deadline(tokens, days, tuple(sorted(tried.items())), found)


def leanest(question: Question) -> Choice:
    """The layout that takes the fewest bytes of a chip, however slow; raises `QuestionError` where there is none."""
    space, pricing = Space(question), Pricing(question)
    best: tuple[float, Candidate] | None = None
    for core in space.cores():
        if core.microbatches not in (space.microbatches(core)[0], space.microbatches(core)[-1]):
            continue  # a single microbatch holds no gradients yet; of several, the smallest hold least
        for work in space.works_of(core):
            if splits := space.splits(core, work):
                most = max(split.shard for split in splits)
                some = [Candidate(core, work, split) for split in splits if split.shard == most]
                leanest_here = min((pricing.bytes(candidate).device, candidate) for candidate in some)
                best = min(best or leanest_here, leanest_here)
    if best is None:
        raise QuestionError("no layout obeys the rules of the runtime: loosen --fix and --without, or change --chips")
    return in_best_place(question, best[1])


def longest(question: Question, searching: Searching) -> list[tuple[int, Choice | None]]:
    """Sequences doubled, with as many tokens a batch, until no layout fits: lengths, and the best layout of each."""
    found: list[tuple[int, Choice | None]] = []
    batch = question.recipe.batch
    length, sequences = batch.length, batch.sequences
    while sequences >= 1:
        other = batch.model_copy(update={"length": length, "sequences": sequences})
        answer = searching(replace(question, recipe=question.recipe.model_copy(update={"batch": other})), 1)
        found.append((length, answer.best[0] if answer.best else None))
        if not answer.best or sequences % 2:
            break
        length, sequences = length * 2, sequences // 2
    return found
