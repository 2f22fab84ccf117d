"""Rules inside a recipe."""

from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase

from danlu.spec.load import ParsedSpec
from danlu.spec.model import Model
from danlu.spec.problem import Problem, suggest_name
from danlu.spec.recipe import LossScaleConfig, MetricsConfig, Recipe

RecipeRule = Callable[[ParsedSpec[Recipe]], Iterator[Problem]]


def precision_module_names(model: Model) -> list[str]:
    """Names of the modules that a pattern under `precision.layers` may match; a tied head is its embedding."""
    blocks = [f"blocks.{layer}" for layer in range(model.layers)]
    experts = [f"blocks.{layer}.mlp.experts" for layer in range(model.layers) if model.is_moe_layer(layer)]
    modules = [f"mtp.{depth}" for depth in range(model.mtp_depth)]
    if model.is_moe_layer(model.layers - 1):
        experts += [f"{module}.block.mlp.experts" for module in modules]
    return ["embed", *blocks, *experts, *modules, *([] if model.tied else ["head"])]


def positions_cover_length(recipe: ParsedSpec[Recipe]) -> Iterator[Problem]:
    """A learned position table has a row for every position of a sequence."""
    model, length = recipe.value.decoder, recipe.value.batch.length
    if model.position == "learned" and length > model.sequence:
        yield recipe.problem(
            "batch.length",
            f"is {length}, but the model's learned positions end at `model.sequence` ({model.sequence})",
            f"length = {model.sequence}, or `sequence = {length}` under [model]",
        )


def wandb_mode_is_used(recipe: ParsedSpec[Recipe]) -> Iterator[Problem]:
    """Without a project nothing is sent to Weights & Biases, in whatever mode."""
    metrics = recipe.value.metrics
    if metrics.wandb_mode != MetricsConfig().wandb_mode and not metrics.wandb:
        yield recipe.problem(
            "metrics.wandb_mode",
            f'is "{metrics.wandb_mode}", but `metrics.wandb` names no project, so it would be ignored',
            'wandb = "…", or remove it',
        )


def warmup_fits(recipe: ParsedSpec[Recipe]) -> Iterator[Problem]:
    """Warm-up ends within the run."""
    warmup, steps = recipe.value.schedule.warmup, recipe.value.steps
    if warmup > steps:
        yield recipe.problem(
            "schedule.warmup",
            f"is {warmup}, but the run has only {steps} steps",
            f"warmup = {max(1, steps // 10)}, a tenth of the run",
        )


def decay_is_used(recipe: ParsedSpec[Recipe]) -> Iterator[Problem]:
    """`schedule.decay` and `schedule.shape` are used by `wsd` only."""
    schedule = recipe.value.schedule
    if schedule.shape != "linear" and schedule.kind != "wsd":
        yield recipe.problem(
            "schedule.shape",
            f'is "{schedule.shape}", but a schedule of kind "{schedule.kind}" ignores it',
            'remove it, or set `kind = "wsd"`',
        )
    if schedule.decay is not None and schedule.kind != "wsd":
        yield recipe.problem(
            "schedule.decay",
            f'is {schedule.decay}, but a schedule of kind "{schedule.kind}" ignores it',
            'remove it, or set `kind = "wsd"`',
        )


def decay_fits(recipe: ParsedSpec[Recipe]) -> Iterator[Problem]:
    """Warm-up and decay do not overlap."""
    schedule, steps = recipe.value.schedule, recipe.value.steps
    if schedule.kind != "wsd" or schedule.decay is None or schedule.warmup > steps:
        return
    if schedule.warmup + schedule.decay > steps:
        yield recipe.problem(
            "schedule.decay",
            f"is {schedule.decay}, which with a warm-up of {schedule.warmup} is longer than the run of {steps} steps",
            f"decay = {steps - schedule.warmup} at most",
        )


def patterns_match(recipe: ParsedSpec[Recipe]) -> Iterator[Problem]:
    """Every pattern of `precision.layers` matches a module."""
    names = precision_module_names(recipe.value.decoder)
    for index, group in enumerate(recipe.value.precision.layers):
        if not any(fnmatchcase(name, group.match) for name in names):
            yield recipe.problem(
                f"precision.layers[{index}].match",
                f'is "{group.match}", which matches no module',
                _other_pattern(group.match, recipe.value.decoder),
            )


def _other_pattern(pattern: str, model: Model) -> str:
    names, last = precision_module_names(model), model.layers - 1
    if "experts" in pattern and not any("experts" in name for name in names):
        return f'the model "{model.name}" has no expert layers'
    hint = suggest_name(pattern, names)
    return f"{hint} (blocks go from 0 to {last})" if hint else f"modules: embed, blocks.0 to blocks.{last}, head"


def loss_scale_is_used(recipe: ParsedSpec[Recipe]) -> Iterator[Problem]:
    """The loss is scaled for fp16 only."""
    precision = recipe.value.precision
    if precision.loss_scale != LossScaleConfig() and not precision.uses_fp16:
        yield recipe.problem(
            "precision.loss_scale",
            f'is set, but nothing is fp16 (`compute` is "{precision.compute}"), so the loss is not scaled',
            'remove it, or set `compute = "fp16"`',
        )


SETTING_RULES: tuple[RecipeRule, ...] = (
    warmup_fits,
    decay_is_used,
    decay_fits,
    loss_scale_is_used,
    wandb_mode_is_used,
)
DECODER_SETTING_RULES: tuple[RecipeRule, ...] = (positions_cover_length, patterns_match)
