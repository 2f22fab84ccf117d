"""Parameters and FLOPs per token of a recipe's model: from its shape, or counted on its module."""

import warnings

import torch
from torch.utils.flop_counter import FlopCounterMode

from danlu.cost.parameter_count import count_parameters, flops_per_token
from danlu.framework.custom.construct import build_module
from danlu.framework.custom.experts import balance_experts
from danlu.framework.custom.forward_trace import fake_tensors
from danlu.spec.custom_model import CustomModel
from danlu.spec.recipe import Recipe


def model_size_and_flops(recipe: Recipe) -> tuple[int, float]:
    """Parameters of the full model, and training FLOPs per token.

    For a custom model the operators of one forward pass are counted, and the backward pass as twice that.
    """
    if not isinstance(recipe.model, CustomModel):
        return count_parameters(recipe.model), flops_per_token(recipe.model, recipe.batch.length)
    with fake_tensors(), torch.no_grad(), FlopCounterMode(display=False) as counter:
        module = build_module(recipe.model)
        size = sum(parameter.numel() for parameter in module.parameters())
        balance_experts(module)
        try:
            module(torch.zeros(1, recipe.batch.length, dtype=torch.int64))
        except Exception as error:  # the user's code and torch's shape functions may raise anything
            message = (
                f"operators of {recipe.model.factory} cannot be counted ({error}): MFU assumes 6 FLOPs per parameter"
            )
            warnings.warn(message, RuntimeWarning, stacklevel=2)
            return size, 6.0 * size
    return size, 3.0 * counter.get_total_flops() / recipe.batch.length
