"""Rules between the global batch and the ranks that share it."""

from collections.abc import Iterator

from danlu.spec.load import Sourced
from danlu.spec.numbers import closest, closest_divisor, closest_multiple
from danlu.spec.plan import Plan
from danlu.spec.problem import Problem
from danlu.spec.recipe import Recipe
from danlu.spec.rules.shape import LayoutRule


def sequences_divide(recipe: Sourced[Recipe], plan: Sourced[Plan]) -> Iterator[Problem]:
    """Every data-parallel rank takes as many sequences."""
    degrees, sequences = plan.value.degrees, recipe.value.batch.sequences
    if sequences % degrees.data:
        yield recipe.problem(
            "batch.sequences",
            f"is {sequences}, but must be a multiple of `replicate` × `shard` "
            f"({degrees.replicate} × {degrees.shard} = {degrees.data})",
            f"sequences = {closest_multiple(sequences, degrees.data * plan.value.microbatches)}",
        )


def microbatches_divide(recipe: Sourced[Recipe], plan: Sourced[Plan]) -> Iterator[Problem]:
    """A rank takes its sequences in equal pieces."""
    held, pieces = _held(recipe, plan), plan.value.microbatches
    if held and held % pieces:
        valid = closest_divisor(pieces, held, also=lambda number: not _wanted(plan.value, number))
        number = valid or closest_divisor(pieces, held)
        yield plan.problem(
            "microbatches",
            f"is {pieces}, but must divide the sequences of a rank "
            f"(`batch.sequences` / `replicate` / `shard` = {held})",
            f"microbatches = {number}",
        )


def microbatches_fill_the_pipeline(recipe: Sourced[Recipe], plan: Sourced[Plan]) -> Iterator[Problem]:
    """A schedule needs enough microbatches, and the looped ones whole rounds of them."""
    pieces = plan.value.microbatches
    if wanted := _wanted(plan.value, pieces):
        yield plan.problem(
            "microbatches",
            f'is {pieces}, but the schedule "{plan.value.pipeline.schedule}" wants {wanted}',
            _enough(recipe, plan),
        )


def _held(recipe: Sourced[Recipe], plan: Sourced[Plan]) -> int:
    """Sequences of one rank; 0 where they do not divide, of which `sequences_divide` speaks."""
    held, rest = divmod(recipe.value.batch.sequences, plan.value.degrees.data)
    return 0 if rest else held


def _wanted(plan: Plan, pieces: int) -> str:
    """What the schedule wants of the number of microbatches, if `pieces` is not it."""
    pp, schedule = plan.degrees.pp, plan.pipeline.schedule
    if pp == 1:
        return ""
    if schedule == "zbv":
        return "" if pieces >= 2 * pp else f"at least 2 × `pp` ({2 * pp})"
    if schedule in ("interleaved", "zero-bubble"):
        return "" if pieces % pp == 0 else f"a multiple of `pp` ({pp})"
    return "" if pieces >= pp else f"at least `pp` ({pp})"


def _enough(recipe: Sourced[Recipe], plan: Sourced[Plan]) -> str:
    """The nearest number that fills the pipeline and divides a rank's sequences, or the batch that would allow one."""
    held, pieces, pp = _held(recipe, plan), plan.value.microbatches, plan.value.degrees.pp
    valid = closest_divisor(pieces, held, also=lambda n: not _wanted(plan.value, n)) if held else None
    if valid:
        return f"microbatches = {valid}"
    number = closest(pieces, [n for n in range(1, 2 * pp + pieces + 1) if not _wanted(plan.value, n)])
    return f"microbatches = {number}, with `batch.sequences` a multiple of {(number or pp) * plan.value.degrees.data}"


BATCH_RULES: tuple[LayoutRule, ...] = (sequences_divide, microbatches_divide, microbatches_fill_the_pipeline)
