"""Llama: the plain decoder, with biases on all projections or on none."""

from typing import Any

from danlu.framework.hf.families.family import ModelFamily
from danlu.framework.hf.families.hf_config import HFConfig
from danlu.spec.model import Model


class Llama(ModelFamily):
    """`LlamaForCausalLM`."""

    model_type = "llama"
    architecture = "LlamaForCausalLM"
    title = "Llama"
    optional_traits = ("bias",)

    def bias_fields(self, config: HFConfig) -> dict[str, Any]:
        """Biases are on attention and feed-forward network together."""
        attention, mlp = bool(config.get("attention_bias")), bool(config.get("mlp_bias"))
        if attention != mlp:
            config.add_unsupported(
                "attention_bias" if attention else "mlp_bias",
                "biases on attention and feed-forward network together, or on neither",
            )
        return {"bias": attention}

    def window_fields(self, config: HFConfig) -> dict[str, Any]:
        """Has none: transformers would compute attention over all positions."""
        fields = super().window_fields(config)
        if fields:
            config.add_unsupported("sliding_window", "no window in this family", 'model_type = "mistral" has one')
        return {}

    def config_values(self, model: Model) -> dict[str, Any]:
        """With the keys of biases."""
        return super().config_values(model) | {"attention_bias": model.bias, "mlp_bias": model.bias}
