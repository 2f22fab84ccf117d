"""Rules of the pipeline: schedule, stages and the layers they hold."""

from collections.abc import Callable, Iterator

from danlu.spec.load import ParsedSpec
from danlu.spec.plan import LOOPED_SCHEDULES, SPLIT_BACKWARD_SCHEDULES, PipelineConfig, Plan
from danlu.spec.problem import Problem, format_value
from danlu.spec.recipe import Recipe
from danlu.spec.recompute import RecomputeLayers
from danlu.spec.rules.shape import LayoutRule

PlanRule = Callable[[ParsedSpec[Plan]], Iterator[Problem]]


def pipeline_settings_are_used(plan: ParsedSpec[Plan]) -> Iterator[Problem]:
    """Without a pipeline its settings are unused."""
    if plan.value.degrees.pp > 1:
        return
    usual = PipelineConfig()
    for name in PipelineConfig.model_fields:
        value, default = getattr(plan.value.pipeline, name), getattr(usual, name)
        if value != default:
            yield plan.problem(
                f"pipeline.{name}",
                f"is {format_value(list(value) if isinstance(value, tuple) else value)}, but `degrees.pp` is 1, so it "
                "is unused",
                f"remove it, or set `pp` to {max(2, len(plan.value.pipeline.layers))} under [degrees]",
            )


def schedule_has_its_stages(plan: ParsedSpec[Plan]) -> Iterator[Problem]:
    """Looped schedules give a rank several stages, the others one."""
    pipeline = plan.value.pipeline
    stages = pipeline.stages_per_rank
    if plan.value.degrees.pp == 1:
        return
    if pipeline.schedule == "zbv":
        needed, valid = "exactly 2", stages == 2
    elif pipeline.schedule in LOOPED_SCHEDULES:
        needed, valid = "2 or more", stages >= 2
    else:
        needed, valid = "1", stages == 1
    if not valid:
        other = '`schedule = "interleaved"`' if stages > 1 else '`schedule = "1f1b"`'
        number = 1 if needed == "1" else 2
        yield plan.problem(
            "pipeline.stages_per_rank",
            f'is {stages}, but the schedule "{pipeline.schedule}" needs {needed}',
            f"stages_per_rank = {number}, or {other}",
        )


def split_backward_keeps_weights_gathered(plan: ParsedSpec[Plan]) -> Iterator[Problem]:
    """A split backward pass needs weights that stay gathered."""
    schedule = plan.value.pipeline.schedule
    if plan.value.degrees.pp > 1 and schedule in SPLIT_BACKWARD_SCHEDULES and plan.value.resolved_reshard_after_forward:
        yield plan.problem(
            "reshard_after_forward",
            f'is true, but the schedule "{schedule}" splits the backward pass, and weights are already resharded '
            "when the weight half runs",
            "reshard_after_forward = false",
        )


def split_backward_is_not_compiled(plan: ParsedSpec[Plan]) -> Iterator[Problem]:
    """The backward pass of a compiled block cannot be split."""
    schedule = plan.value.pipeline.schedule
    if plan.value.degrees.pp > 1 and schedule in SPLIT_BACKWARD_SCHEDULES and plan.value.compile:
        yield plan.problem(
            "compile",
            f'is true, but the schedule "{schedule}" splits the backward pass, which a compiled block does not support',
            'compile = false, or `schedule = "interleaved"` under [pipeline]',
        )


def split_backward_is_not_recomputed_in_part(plan: ParsedSpec[Plan]) -> Iterator[Problem]:
    """What selective recompute saves is used once, but a split backward pass would use it twice."""
    schedule, recompute = plan.value.pipeline.schedule, plan.value.recompute
    in_part = recompute == "selective" or (isinstance(recompute, RecomputeLayers) and recompute.selective)
    if plan.value.degrees.pp > 1 and schedule in SPLIT_BACKWARD_SCHEDULES and in_part:
        yield plan.problem(
            "recompute",
            f'is "{recompute}", but the schedule "{schedule}" splits the backward pass, and saved activations can be '
            "used only once",
            'recompute = "full", or "none"',
        )


def layers_are_positive(plan: ParsedSpec[Plan]) -> Iterator[Problem]:
    """Every stage holds at least one layer."""
    layers = list(plan.value.pipeline.layers)
    if layers and min(layers) < 1:
        base, extra = divmod(max(sum(layers), len(layers)), len(layers))
        even = [base + (stage < extra) for stage in range(len(layers))]
        yield plan.problem(
            "pipeline.layers",
            f"is {format_value(layers)}, but every stage must hold at least 1 layer",
            f"layers = {even}",
        )


def one_layer_count_per_stage(plan: ParsedSpec[Plan]) -> Iterator[Problem]:
    """`pipeline.layers` has one entry per stage."""
    value = plan.value
    if value.degrees.pp > 1 and value.pipeline.layers and len(value.pipeline.layers) != value.num_stages:
        yield plan.problem(
            "pipeline.layers",
            f"has {len(value.pipeline.layers)} entries, but there are {value.num_stages} stages "
            f"(`pp` × `stages_per_rank` = {value.degrees.pp} × {value.pipeline.stages_per_rank})",
            "one entry per stage, or remove it to spread the layers evenly",
        )


def layers_fill_the_stages(recipe: ParsedSpec[Recipe], plan: ParsedSpec[Plan]) -> Iterator[Problem]:
    """There are enough layers for the stages."""
    layers, value = recipe.value.decoder.layers, plan.value
    if value.degrees.pp > 1 and value.num_stages > layers:
        per_rank = value.pipeline.stages_per_rank
        yield plan.problem(
            "degrees.pp",
            f"is {value.degrees.pp}, which with `stages_per_rank` {per_rank} makes {value.num_stages} stages, but the "
            f"model has only {layers} layers",
            f"pp = {max(1, layers // per_rank)} at most",
        )


def layers_add_up(recipe: ParsedSpec[Recipe], plan: ParsedSpec[Plan]) -> Iterator[Problem]:
    """`pipeline.layers` places every layer once."""
    layers, stages = recipe.value.decoder.layers, plan.value.pipeline.layers
    if plan.value.degrees.pp > 1 and stages and sum(stages) != layers:
        pipeline = plan.value.pipeline.model_copy(update={"layers": ()})
        even = [len(held) for held in plan.value.model_copy(update={"pipeline": pipeline}).stage_layers(layers)]
        yield plan.problem(
            "pipeline.layers", f"adds up to {sum(stages)} layers, but the model has {layers}", f"layers = {even}"
        )


def recomputed_layers_exist(recipe: ParsedSpec[Recipe], plan: ParsedSpec[Plan]) -> Iterator[Problem]:
    """Recompute by layer names layers of the model."""
    recompute = plan.value.recompute
    if isinstance(recompute, RecomputeLayers) and (wrong := recompute.beyond(recipe.value.decoder.layers)):
        yield plan.problem(*wrong)


def tied_on_one_stage(recipe: ParsedSpec[Recipe], plan: ParsedSpec[Plan]) -> Iterator[Problem]:
    """A tied embedding cannot be on the first stage and on the last."""
    pp = plan.value.degrees.pp
    if recipe.value.decoder.tied and pp > 1:
        yield recipe.problem(
            "model.tied",
            f"is true, but with `degrees.pp` {pp} the embedding and the head are on different stages",
            "tied = false, or `pp = 1` in the plan",
        )


def split_backward_has_no_mtp(recipe: ParsedSpec[Recipe], plan: ParsedSpec[Plan]) -> Iterator[Problem]:
    """The halves of a split backward pass go through a parameter once; multi-token prediction uses the head again."""
    schedule = plan.value.pipeline.schedule
    if plan.value.degrees.pp > 1 and schedule in SPLIT_BACKWARD_SCHEDULES and recipe.value.decoder.mtp:
        yield plan.problem(
            "pipeline.schedule",
            f'is "{schedule}", which splits the backward pass, but multi-token prediction ([model.mtp]) uses the '
            "output matrix several times, and a half can go through a matrix only once",
            'schedule = "interleaved", or omit [model.mtp]',
        )


STAGE_RULES: tuple[PlanRule, ...] = (
    pipeline_settings_are_used,
    schedule_has_its_stages,
    split_backward_keeps_weights_gathered,
    split_backward_is_not_compiled,
    split_backward_is_not_recomputed_in_part,
    layers_are_positive,
    one_layer_count_per_stage,
)
PIPELINE_RULES: tuple[LayoutRule, ...] = (
    layers_fill_the_stages,
    layers_add_up,
    recomputed_layers_exist,
    tied_on_one_stage,
    split_backward_has_no_mtp,
)
