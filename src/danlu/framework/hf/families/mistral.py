"""Mistral: a plain decoder without biases, with a window in every layer or in none."""

from typing import Any

from danlu.framework.hf.families.family import ModelFamily
from danlu.framework.hf.families.keys import COMMON_DEFAULTS
from danlu.spec.model import Model


class Mistral(ModelFamily):
    """`MistralForCausalLM`."""

    model_type = "mistral"
    architecture = "MistralForCausalLM"
    title = "Mistral"
    defaults = COMMON_DEFAULTS | {"num_key_value_heads": 8, "sliding_window": 4096}
    optional_traits = ("window",)

    def config_values(self, model: Model) -> dict[str, Any]:
        """With the window."""
        return super().config_values(model) | {"sliding_window": model.window}
