"""Qwen2: biases on queries, keys and values."""

from typing import Any

from danlu.framework.hf.families.family import ModelFamily
from danlu.framework.hf.families.hf_config import HFConfig
from danlu.framework.hf.families.keys import COMMON_DEFAULTS, COMMON_KINDS
from danlu.framework.hf.families.windows import FULL, SLIDING, layer_kinds
from danlu.spec.model import Model

QWEN_DEFAULTS = COMMON_DEFAULTS | {
    "num_key_value_heads": 32,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
QWEN_KINDS = COMMON_KINDS | {"max_window_layers": "number"}


class Qwen(ModelFamily):
    """What both have in common: a window in the layers after the first, if it is in use."""

    defaults = QWEN_DEFAULTS
    kinds = QWEN_KINDS
    optional_traits = ("window", "window.mixed")

    def default_kinds(self, config: HFConfig, layers: int) -> list[str]:
        """The first layers have no window; without `use_sliding_window` none has."""
        first = int(config.get("max_window_layers")) if config.get("use_sliding_window") else layers
        return [FULL if layer < first else SLIDING for layer in range(layers)]

    def config_values(self, model: Model) -> dict[str, Any]:
        """With the window, and the layers that have it."""
        values = super().config_values(model) | {
            "sliding_window": model.window,
            "use_sliding_window": model.window is not None,
        }
        if model.window is not None:
            values["layer_types"] = layer_kinds(model)
            if model.global_every is None:  # for versions that read no list
                values["max_window_layers"] = model.global_first
        return values


class Qwen2(Qwen):
    """`Qwen2ForCausalLM`."""

    model_type = "qwen2"
    architecture = "Qwen2ForCausalLM"
    title = "Qwen2"
    traits = ("qkv_bias",)

    def bias_fields(self, config: HFConfig) -> dict[str, Any]:
        """Always on queries, keys and values."""
        return super().bias_fields(config) | {"qkv_bias": True}
