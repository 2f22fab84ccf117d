"""Mistral: a plain decoder without biases."""

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

    def config_values(self, model: Model) -> dict[str, Any]:
        """Without a window: one that was as long as the model at import may not be so now."""
        return super().config_values(model) | {"sliding_window": None}
