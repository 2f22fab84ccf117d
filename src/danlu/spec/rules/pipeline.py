"""Rules of the pipeline: schedule, stages and the layers they hold."""

from collections.abc import Callable, Iterator

from danlu.spec.load import Sourced
from danlu.spec.plan import LOOPED_SCHEDULES, SPLIT_SCHEDULES, Pipeline, Plan
from danlu.spec.problem import Problem, shown
from danlu.spec.recipe import Recipe
from danlu.spec.rules.shape import LayoutRule

PlanRule = Callable[[Sourced[Plan]], Iterator[Problem]]


def pipeline_is_read(plan: Sourced[Plan]) -> Iterator[Problem]:
    """Without a pipeline nothing reads its settings."""
    if plan.value.degrees.pp > 1:
        return
    usual = Pipeline()
    for name in Pipeline.model_fields:
        value, default = getattr(plan.value.pipeline, name), getattr(usual, name)
        if value != default:
            yield plan.problem(
                f"pipeline.{name}",
                f"is {shown(list(value) if isinstance(value, tuple) else value)}, but `degrees.pp` is 1, so that "
                "nothing reads it",
                f"remove it, or set `pp` to {max(2, len(plan.value.pipeline.layers))} under [degrees]",
            )


def schedule_has_its_stages(plan: Sourced[Plan]) -> Iterator[Problem]:
    """Looped schedules give a rank several stages, the others one."""
    pipeline = plan.value.pipeline
    stages = pipeline.stages_per_rank
    if plan.value.degrees.pp == 1:
        return
    if pipeline.schedule == "zbv":
        wanted, right = "exactly 2", stages == 2
    elif pipeline.schedule in LOOPED_SCHEDULES:
        wanted, right = "2 or more", stages >= 2
    else:
        wanted, right = "1", stages == 1
    if not right:
        other = '`schedule = "interleaved"`' if stages > 1 else '`schedule = "1f1b"`'
        number = 1 if wanted == "1" else 2
        yield plan.problem(
            "pipeline.stages_per_rank",
            f'is {stages}, but the schedule "{pipeline.schedule}" wants {wanted}',
            f"stages_per_rank = {number}, or {other}",
        )


def split_backward_finds_weights(plan: Sourced[Plan]) -> Iterator[Problem]:
    """A backward pass in two halves finds the weights only if they stayed gathered."""
    schedule = plan.value.pipeline.schedule
    if plan.value.degrees.pp > 1 and schedule in SPLIT_SCHEDULES and plan.value.reshards:
        yield plan.problem(
            "reshard_after_forward",
            f'is true, but the schedule "{schedule}" takes the backward pass in two halves, and the one for weights '
            "would find them gone",
            "reshard_after_forward = false",
        )


def split_backward_is_not_compiled(plan: Sourced[Plan]) -> Iterator[Problem]:
    """A compiled block has one backward pass, not two halves."""
    schedule = plan.value.pipeline.schedule
    if plan.value.degrees.pp > 1 and schedule in SPLIT_SCHEDULES and plan.value.compile:
        yield plan.problem(
            "compile",
            f'is true, but the schedule "{schedule}" takes the backward pass in two halves, which a compiled block '
            "has not",
            'compile = false, or `schedule = "interleaved"` under [pipeline]',
        )


def split_backward_is_not_recomputed_in_part(plan: Sourced[Plan]) -> Iterator[Problem]:
    """What selective recompute kept is used once, and two halves of a backward pass would use it twice."""
    schedule = plan.value.pipeline.schedule
    if plan.value.degrees.pp > 1 and schedule in SPLIT_SCHEDULES and plan.value.recompute == "selective":
        yield plan.problem(
            "recompute",
            f'is "selective", but the schedule "{schedule}" takes the backward pass in two halves, and what was kept '
            "serves only one",
            'recompute = "full", or "none"',
        )


def layers_are_positive(plan: Sourced[Plan]) -> Iterator[Problem]:
    """Every stage holds a layer."""
    layers = list(plan.value.pipeline.layers)
    if layers and min(layers) < 1:
        base, extra = divmod(max(sum(layers), len(layers)), len(layers))
        even = [base + (stage < extra) for stage in range(len(layers))]
        yield plan.problem(
            "pipeline.layers", f"is {shown(layers)}, but every stage must hold at least 1 layer", f"layers = {even}"
        )


def layers_are_for_the_stages(plan: Sourced[Plan]) -> Iterator[Problem]:
    """`pipeline.layers` has one entry a stage."""
    value = plan.value
    if value.degrees.pp > 1 and value.pipeline.layers and len(value.pipeline.layers) != value.stages:
        yield plan.problem(
            "pipeline.layers",
            f"has {len(value.pipeline.layers)} entries, but there are {value.stages} stages "
            f"(`pp` × `stages_per_rank` = {value.degrees.pp} × {value.pipeline.stages_per_rank})",
            "one entry a stage, or remove it to spread the layers evenly",
        )


def layers_fill_the_stages(recipe: Sourced[Recipe], plan: Sourced[Plan]) -> Iterator[Problem]:
    """There are layers enough for the stages."""
    layers, value = recipe.value.decoder.layers, plan.value
    if value.degrees.pp > 1 and value.stages > layers:
        per_rank = value.pipeline.stages_per_rank
        yield plan.problem(
            "degrees.pp",
            f"is {value.degrees.pp}, which with `stages_per_rank` {per_rank} makes {value.stages} stages, but the "
            f"model has only {layers} layers",
            f"pp = {max(1, layers // per_rank)} at most",
        )


def layers_add_up(recipe: Sourced[Recipe], plan: Sourced[Plan]) -> Iterator[Problem]:
    """`pipeline.layers` places every layer once."""
    layers, stages = recipe.value.decoder.layers, plan.value.pipeline.layers
    if plan.value.degrees.pp > 1 and stages and sum(stages) != layers:
        pipeline = plan.value.pipeline.model_copy(update={"layers": ()})
        even = [len(held) for held in plan.value.model_copy(update={"pipeline": pipeline}).stage_layers(layers)]
        yield plan.problem(
            "pipeline.layers", f"adds up to {sum(stages)} layers, but the model has {layers}", f"layers = {even}"
        )


def tied_on_one_stage(recipe: Sourced[Recipe], plan: Sourced[Plan]) -> Iterator[Problem]:
    """A shared table cannot live on the first stage and on the last."""
    pp = plan.value.degrees.pp
    if recipe.value.decoder.tied and pp > 1:
        yield recipe.problem(
            "model.tied",
            f"is true, but with `degrees.pp` {pp} the embedding and the head live on different stages",
            "tied = false, or `pp = 1` in the plan",
        )


STAGE_RULES: tuple[PlanRule, ...] = (
    pipeline_is_read,
    schedule_has_its_stages,
    split_backward_finds_weights,
    split_backward_is_not_compiled,
    split_backward_is_not_recomputed_in_part,
    layers_are_positive,
    layers_are_for_the_stages,
)
PIPELINE_RULES: tuple[LayoutRule, ...] = (layers_fill_the_stages, layers_add_up, tied_on_one_stage)
