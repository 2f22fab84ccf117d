"""Qwen2: biases on queries, keys and values."""

from typing import Any

from danlu.framework.hf.families.family import ModelFamily
from danlu.framework.hf.families.hf_config import HFConfig
from danlu.framework.hf.families.keys import COMMON_DEFAULTS
from danlu.spec.model import Model

QWEN_DEFAULTS = COMMON_DEFAULTS | {
    "num_key_value_heads": 32,
    "use_sliding_window": False,
    "sliding_window": 4096,
}


class Qwen2(ModelFamily):
    """`Qwen2ForCausalLM`."""

    model_type = "qwen2"
    architecture = "Qwen2ForCausalLM"
    title = "Qwen2"
    defaults = QWEN_DEFAULTS
    traits = ("qkv_bias",)

    def bias_fields(self, config: HFConfig) -> dict[str, Any]:
        """Always on queries, keys and values."""
        return super().bias_fields(config) | {"qkv_bias": True}

    def config_values(self, model: Model) -> dict[str, Any]:
        """Without a window: one that was as long as the model at import may not be so now."""
        return super().config_values(model) | {"sliding_window": None, "use_sliding_window": False}
