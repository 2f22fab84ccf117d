"""Rules of `operators`: where a choice of implementations would be read by nothing."""

from collections.abc import Callable, Iterator

from danlu.spec.custom_model import CustomModel
from danlu.spec.load import ParsedSpec
from danlu.spec.operator_table import RoutedOperator
from danlu.spec.plan import Plan
from danlu.spec.problem import Problem
from danlu.spec.recipe import Recipe
from danlu.spec.rules.pipeline import PlanRule
from danlu.spec.rules.shape import LayoutRule

IN_BLOCKS: tuple[RoutedOperator, ...] = ("gated_product", "rotate")
"""Operators of blocks alone, which compiled blocks do not call; a norm also stands before the head."""

_OF_MODULES: tuple[RoutedOperator, ...] = ("rms_norm", "gated_product", "masked_attention", "grouped_mm")
"""Operators that `use_kernels` puts into modules of a custom model."""


def compiled_blocks_choose_nothing(plan: ParsedSpec[Plan]) -> Iterator[Problem]:
    """A compiler makes its own kernels of what a block computes."""
    for name in IN_BLOCKS:
        if plan.value.compile and name in plan.value.operators:
            yield plan.problem(
                f"operators.{name}",
                f'is "{plan.value.operators[name]}", but `compile` is true, and compilers make their own kernel of it',
                "remove it, or compile = false",
            )


def custom_models_call_their_own(recipe: ParsedSpec[Recipe], plan: ParsedSpec[Plan]) -> Iterator[Problem]:
    """Of a custom model only the loss is Danlu's, and casts to fp8; with `use_kernels` norms and more, too."""
    model = recipe.value.model
    called: set[RoutedOperator] = {"cross_entropy"}
    if isinstance(model, CustomModel) and model.use_kernels:
        called.update(_OF_MODULES)
    if recipe.value.precision.quantizes:
        called.add("quantize_rows")
    for name, implementation in plan.value.operators.items():
        if name not in called:
            yield plan.problem(
                f"operators.{name}",
                f'is "{implementation}", but a custom model (`model.factory`) computes with its own modules',
                "`use_kernels = true` under [model]"
                if name in _OF_MODULES
                else "remove it, or describe the model by its shape",
            )


def why_not_masked_attention(recipe: Recipe, plan: Plan) -> tuple[str, str] | None:
    """Why a decoder would not call `masked_attention`, and what to do about a choice of it; None if it would."""
    model = recipe.decoder
    if model.materializes_scores:
        return "the scores of this model are in memory, where masks are added", "remove it"
    if plan.degrees.cp > 1 and plan.context_parallel == "ring":
        return "a ring attends block by block with an operator of its own", 'remove it, or context_parallel = "ulysses"'
    if model.window is None and not recipe.data.document_mask:
        return "every token sees all before it", "remove it, or `document_mask = true` under [data]"
    return None


def why_no_grouped_mm(recipe: Recipe, plan: Plan) -> tuple[str, str] | None:
    """Why a decoder would not call `grouped_mm`, and what to do about a choice of it; None if it would."""
    if recipe.decoder.moe is None:
        return "this model has no experts", "remove it"
    if recipe.precision.matmul != "none" and not recipe.precision.layers:
        return f"experts in {recipe.precision.matmul} are quantized, and multiplied one by one", "remove it"
    return None


def why_no_quantize_rows(recipe: Recipe, plan: Plan) -> tuple[str, str] | None:
    """Why nothing would call `quantize_rows`, and what to do about a choice of it; None if something would."""
    return None if recipe.precision.quantizes else ("no product of this recipe is of fp8", "remove it")


WHY_NOT: dict[RoutedOperator, Callable[[Recipe, Plan], tuple[str, str] | None]] = {
    "masked_attention": why_not_masked_attention,
    "grouped_mm": why_no_grouped_mm,
    "quantize_rows": why_no_quantize_rows,
}
"""Why a decoder would not call an operator, of those that not every one does."""


def unread_choices(recipe: ParsedSpec[Recipe], plan: ParsedSpec[Plan]) -> Iterator[Problem]:
    """A choice of what nothing in this decoder calls."""
    for name, why_not in WHY_NOT.items():
        implementation = plan.value.operators.get(name)
        if implementation is not None and (found := why_not(recipe.value, plan.value)):
            reason, remedy = found
            yield plan.problem(f"operators.{name}", f'is "{implementation}", but {reason}', remedy)


OPERATOR_RULES: tuple[PlanRule, ...] = (compiled_blocks_choose_nothing,)
DECODER_OPERATOR_RULES: tuple[LayoutRule, ...] = (unread_choices,)
CUSTOM_OPERATOR_RULES: tuple[LayoutRule, ...] = (custom_models_call_their_own,)
