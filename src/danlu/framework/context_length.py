"""The longest sequence that the model of a recipe supports."""

from danlu.framework.custom.construct import build_meta_module
from danlu.spec.custom_model import CustomModel
from danlu.spec.recipe import Recipe


def context_length(recipe: Recipe) -> int:
    """Of a described model its `sequence`, of a `transformers` model what its configuration says.

    Of any other module only the length that it is trained at is known.
    """
    if not isinstance(recipe.model, CustomModel):
        return recipe.model.sequence
    config = getattr(build_meta_module(recipe.model), "config", None)
    longest = getattr(config, "max_position_embeddings", None)
    return longest if isinstance(longest, int) and longest > 0 else recipe.batch.length
