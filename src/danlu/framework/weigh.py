"""The size of a recipe's model and the work of a token: counted from its shape, or from its module."""

import warnings

import torch
from torch.utils.flop_counter import FlopCounterMode

from danlu.cost.model import flops_per_token, parameters
from danlu.framework.own.factory import make
from danlu.framework.own.rehearsal import without_memory
from danlu.spec.own_model import OwnModel
from danlu.spec.recipe import Recipe


def weigh(recipe: Recipe) -> tuple[int, float]:
    """Parameters of the whole model, and the FLOPs that training takes a token.

    Of a user's own module the operators of one forward pass are counted, and the backward pass as twice that.
    """
    if not isinstance(recipe.model, OwnModel):
        return parameters(recipe.model), flops_per_token(recipe.model, recipe.batch.length)
    with without_memory(), torch.no_grad(), FlopCounterMode(display=False) as counter:
        module = make(recipe.model)
        size = sum(parameter.numel() for parameter in module.parameters())
        try:
            module(torch.zeros(1, recipe.batch.length, dtype=torch.int64))
        except Exception as error:  # the user's code and torch's shape functions: whatever they raise is told
            message = f"operators of {recipe.model.factory} cannot be counted ({error}): MFU takes 6 FLOPs a parameter"
            warnings.warn(message, RuntimeWarning, stacklevel=2)
            return size, 6.0 * size
    return size, 3.0 * counter.get_total_flops() / recipe.batch.length
