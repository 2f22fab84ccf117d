"""Rules of `regather_inputs`: where it would do nothing, or cannot work."""

from collections.abc import Iterator

from danlu.spec.load import ParsedSpec
from danlu.spec.plan import Plan
from danlu.spec.problem import Problem
from danlu.spec.recipe import Recipe
from danlu.spec.rules.pipeline import PlanRule
from danlu.spec.rules.shape import LayoutRule


def something_is_gathered(plan: ParsedSpec[Plan]) -> Iterator[Problem]:
    """Only tensor parallelism gathers inputs."""
    if plan.value.regather_inputs and plan.value.degrees.tp == 1:
        yield plan.problem(
            "regather_inputs",
            "is true, but `degrees.tp` is 1, so no input is gathered",
            "regather_inputs = false, or set `tp` to 2 or more under [degrees]",
        )


def regathered_inputs_are_not_compiled(plan: ParsedSpec[Plan]) -> Iterator[Problem]:
    """PyTorch 2.13's compiler fails on the function that gathers again: it cannot trace the gradient of `to_local`."""
    if plan.value.regather_inputs and plan.value.compile:
        yield plan.problem(
            "regather_inputs",
            "is true, but `compile` is too, and torch's compiler cannot trace the function that gathers again",
            "regather_inputs = false, or compile = false",
        )


def some_layer_keeps_its_inputs(recipe: ParsedSpec[Recipe], plan: ParsedSpec[Plan]) -> Iterator[Problem]:
    """Layers that recompute gather their inputs again in any case."""
    value = plan.value
    if value.regather_inputs and value.degrees.tp > 1 and not value.regathered_layers(recipe.value.decoder.layers):
        yield plan.problem(
            "regather_inputs",
            "is true, but every layer recomputes, which gathers its inputs again in any case",
            'regather_inputs = false, or recompute = "none"',
        )


def custom_models_gather_nothing(recipe: ParsedSpec[Recipe], plan: ParsedSpec[Plan]) -> Iterator[Problem]:
    """The hidden states of a custom model are replicated over `tp`."""
    if plan.value.regather_inputs and plan.value.degrees.tp > 1:
        yield plan.problem(
            "regather_inputs",
            "is true, but the hidden states of a custom model (`model.factory`) are replicated over `tp`, so no input "
            "is gathered",
            'remove it; recompute = "full" takes less memory; or describe the model by its shape',
        )


REGATHER_RULES: tuple[PlanRule, ...] = (something_is_gathered, regathered_inputs_are_not_compiled)
DECODER_REGATHER_RULES: tuple[LayoutRule, ...] = (some_layer_keeps_its_inputs,)
CUSTOM_REGATHER_RULES: tuple[LayoutRule, ...] = (custom_models_gather_nothing,)
