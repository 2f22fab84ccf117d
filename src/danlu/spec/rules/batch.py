"""Rules between the global batch and the ranks that share it."""

from collections.abc import Iterator

from danlu.spec.divisors import closest, closest_divisor, closest_multiple
from danlu.spec.load import ParsedSpec
from danlu.spec.plan import Plan
from danlu.spec.problem import Problem
from danlu.spec.recipe import BatchConfig, Recipe
from danlu.spec.rules.shape import LayoutRule


def sequences_divide(recipe: ParsedSpec[Recipe], plan: ParsedSpec[Plan]) -> Iterator[Problem]:
    """Every data-parallel rank gets the same number of sequences."""
    degrees, sequences = plan.value.degrees, recipe.value.batch.sequences
    if sequences % degrees.dp:
        yield recipe.problem(
            "batch.sequences",
            f"is {sequences}, but must be a multiple of `replicate` × `shard` "
            f"({degrees.replicate} × {degrees.shard} = {degrees.dp})",
            f"sequences = {closest_multiple(sequences, degrees.dp * plan.value.microbatches)}",
        )


def microbatches_divide(recipe: ParsedSpec[Recipe], plan: ParsedSpec[Plan]) -> Iterator[Problem]:
    """A rank splits its sequences into equal microbatches."""
    held, pieces = _held(recipe, plan), plan.value.microbatches
    if held and held % pieces:
        valid = closest_divisor(pieces, held, also=lambda number: not _needed(plan.value, number))
        number = valid or closest_divisor(pieces, held)
        yield plan.problem(
            "microbatches",
            f"is {pieces}, but must divide the sequences of a rank "
            f"(`batch.sequences` / `replicate` / `shard` = {held})",
            f"microbatches = {number}",
        )


def microbatches_fill_the_pipeline(recipe: ParsedSpec[Recipe], plan: ParsedSpec[Plan]) -> Iterator[Problem]:
    """A schedule needs enough microbatches, and the looped ones full rounds of them."""
    pieces = plan.value.microbatches
    if needed := _needed(plan.value, pieces):
        yield plan.problem(
            "microbatches",
            f'is {pieces}, but the schedule "{plan.value.pipeline.schedule}" needs {needed}',
            _enough(recipe, plan),
        )


def _held(recipe: ParsedSpec[Recipe], plan: ParsedSpec[Plan]) -> int:
    """Sequences of one rank; 0 if they do not divide, which `sequences_divide` reports."""
    held, rest = divmod(recipe.value.batch.sequences, plan.value.degrees.dp)
    return 0 if rest else held


def _needed(plan: Plan, pieces: int) -> str:
    """What the schedule needs of the number of microbatches, if `pieces` does not satisfy it."""
    pp, schedule = plan.degrees.pp, plan.pipeline.schedule
    if pp == 1:
        return ""
    if schedule == "zbv":
        return "" if pieces >= 2 * pp else f"at least 2 × `pp` ({2 * pp})"
    if schedule in ("interleaved", "zero-bubble"):
        return "" if pieces % pp == 0 else f"a multiple of `pp` ({pp})"
    return "" if pieces >= pp else f"at least `pp` ({pp})"


def _enough(recipe: ParsedSpec[Recipe], plan: ParsedSpec[Plan]) -> str:
    """The nearest number that fills the pipeline and divides a rank's sequences, or the batch that would allow one."""
    held, pieces, pp = _held(recipe, plan), plan.value.microbatches, plan.value.degrees.pp
    valid = closest_divisor(pieces, held, also=lambda n: not _needed(plan.value, n)) if held else None
    if valid:
        return f"microbatches = {valid}"
    number = closest(pieces, [n for n in range(1, 2 * pp + pieces + 1) if not _needed(plan.value, n)])
    return f"microbatches = {number}, with `batch.sequences` a multiple of {(number or pp) * plan.value.degrees.dp}"


def ramp_rises(recipe: ParsedSpec[Recipe]) -> Iterator[Problem]:
    """Stages of a ramp follow each other, each with a larger batch, and end before the run does."""
    batch, steps = recipe.value.batch, recipe.value.steps
    before, smaller = 0, 0
    for index, stage in enumerate(batch.ramp):
        key, following = f"batch.ramp[{index}]", [each.sequences for each in batch.ramp[index + 1 :]]
        larger = min([*following, batch.sequences])
        if stage.until <= before:
            yield recipe.problem(
                f"{key}.until", f"is {stage.until}, but the stage begins after step {before}", f"until = {before + 1}"
            )
        elif stage.until >= steps:
            yield recipe.problem(
                f"{key}.until", f"is {stage.until}, but the run ends at step {steps}", f"until = {max(1, steps - 1)}"
            )
        if not smaller < stage.sequences < larger:
            yield recipe.problem(
                f"{key}.sequences",
                f"is {stage.sequences}, but must be more than before ({smaller}) and less than after ({larger})",
                f"sequences = {max(1, (smaller + larger) // 2)}",
            )
        before, smaller = max(before, stage.until), stage.sequences


def ramp_divides(batch: BatchConfig, data_ranks: int, microbatches: int, *, pipeline: bool) -> bool:
    """Whether every stage of a ramp is whole microbatches of the full batch's size, or one smaller one."""
    unit = batch.sequences // microbatches
    return all(
        stage.sequences % data_ranks == 0 if stage.sequences < unit and not pipeline else stage.sequences % unit == 0
        for stage in batch.ramp
    )


def ramp_keeps_microbatches(recipe: ParsedSpec[Recipe], plan: ParsedSpec[Plan]) -> Iterator[Problem]:
    """A smaller batch has fewer microbatches of the same size, enough of them for the pipeline, or one smaller one."""
    held, pieces = _held(recipe, plan), plan.value.microbatches
    if not held or held % pieces:
        return  # other rules report it
    unit = recipe.value.batch.sequences // pieces
    for index, stage in enumerate(recipe.value.batch.ramp):
        key = f"batch.ramp[{index}].sequences"
        if plan.value.degrees.pp == 1 and stage.sequences < unit:
            if stage.sequences % plan.value.degrees.dp:
                yield recipe.problem(
                    key,
                    f"is {stage.sequences}, but must be a multiple of `replicate` × `shard` ({plan.value.degrees.dp})",
                    f"sequences = {closest_multiple(stage.sequences, plan.value.degrees.dp)}",
                )
        elif stage.sequences % unit:
            yield recipe.problem(
                key,
                f"is {stage.sequences}, but must be a multiple of the {unit} sequences of one microbatch on all ranks "
                f"(`batch.sequences` / `microbatches` = {recipe.value.batch.sequences} / {pieces})",
                f"sequences = {closest_multiple(stage.sequences, unit)}, or more `microbatches` in the plan",
            )
        elif needed := _needed(plan.value, stage.sequences // unit):
            yield recipe.problem(
                key,
                f"is {stage.sequences}, which is {stage.sequences // unit} microbatches, but the schedule "
                f'"{plan.value.pipeline.schedule}" needs {needed}',
                "a larger batch at the start, or more `microbatches` in the plan",
            )


RAMP_RULES = (ramp_rises,)
BATCH_RULES: tuple[LayoutRule, ...] = (
    sequences_divide,
    microbatches_divide,
    microbatches_fill_the_pipeline,
    ramp_keeps_microbatches,
)
