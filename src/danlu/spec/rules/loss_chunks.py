"""Rules of `loss_chunks`: where a head cannot make the loss out of some logits at a time."""

from collections.abc import Iterator

from danlu.spec.load import ParsedSpec
from danlu.spec.plan import Plan
from danlu.spec.problem import Problem
from danlu.spec.recipe import Recipe
from danlu.spec.rules.pipeline import PlanRule
from danlu.spec.rules.shape import LayoutRule

_ALL_AT_ONCE = "loss_chunks = 1"


def pipelines_return_logits(plan: ParsedSpec[Plan]) -> Iterator[Problem]:
    """The loss of a pipeline is computed by its schedule, from what the last stage returns."""
    if plan.value.loss_chunks > 1 and plan.value.degrees.pp > 1:
        yield plan.problem(
            "loss_chunks",
            f"is {plan.value.loss_chunks} and `degrees.pp` {plan.value.degrees.pp}, but the last stage of a pipeline "
            "returns all logits, from which the schedule computes the loss",
            f"{_ALL_AT_ONCE}, or pp = 1",
        )


def heads_return_logits(recipe: ParsedSpec[Recipe], plan: ParsedSpec[Plan]) -> Iterator[Problem]:
    """Multi-token prediction adds its losses to logits, and a cap is applied to them."""
    model, chunks = recipe.value.decoder, plan.value.loss_chunks
    if chunks > 1 and model.mtp is not None:
        yield plan.problem(
            "loss_chunks", f"is {chunks}, but multi-token prediction (`model.mtp`) needs all logits", _ALL_AT_ONCE
        )
    if chunks > 1 and model.logit_softcap is not None:
        yield plan.problem(
            "loss_chunks", f"is {chunks}, but the model caps its logits (`model.logit_softcap`)", _ALL_AT_ONCE
        )


def custom_models_return_logits(recipe: ParsedSpec[Recipe], plan: ParsedSpec[Plan]) -> Iterator[Problem]:
    """Where a custom model multiplies by its output matrix, only its code knows."""
    if (chunks := plan.value.loss_chunks) > 1:
        yield plan.problem(
            "loss_chunks",
            f"is {chunks}, but a custom model (`model.factory`) returns all logits",
            f"{_ALL_AT_ONCE}, or describe the model by its shape",
        )


LOSS_CHUNK_RULES: tuple[PlanRule, ...] = (pipelines_return_logits,)
DECODER_LOSS_CHUNK_RULES: tuple[LayoutRule, ...] = (heads_return_logits,)
CUSTOM_LOSS_CHUNK_RULES: tuple[LayoutRule, ...] = (custom_models_return_logits,)
