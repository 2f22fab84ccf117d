"""Qwen3: a norm over every head of queries and keys."""

from typing import Any

from danlu.framework.hf.families.hf_config import HFConfig
from danlu.framework.hf.families.qwen2 import QWEN_DEFAULTS, Qwen
from danlu.spec.model import Model


class Qwen3(Qwen):
    """`Qwen3ForCausalLM`."""

    model_type = "qwen3"
    architecture = "Qwen3ForCausalLM"
    title = "Qwen3"
    defaults = QWEN_DEFAULTS | {"head_dim": 128}
    traits = ("qk_norm",)

    def model_fields(self, config: HFConfig) -> dict[str, Any]:
        """With its norm."""
        return super().model_fields(config) | {"qk_norm": True}

    def config_values(self, model: Model) -> dict[str, Any]:
        """With the key of biases, of which it has none."""
        return super().config_values(model) | {"attention_bias": False}
