"""Gemma 2 and Gemma 3 (text): norms around both parts of a layer, windows in most layers, scaled embeddings."""

from collections.abc import Collection
from typing import Any, ClassVar

from danlu.framework.hf.families.family import ModelFamily
from danlu.framework.hf.families.hf_config import HFConfig
from danlu.framework.hf.families.keys import COMMON_DEFAULTS, COMMON_KINDS, ONLY_VALUES
from danlu.framework.hf.families.rope import rope_fields
from danlu.framework.hf.families.tensor_names import ATTENTION, BLOCK, DENSE, ENDS, LAYER, TensorNamePair
from danlu.framework.hf.families.windows import FULL, SLIDING, layer_kinds, window_fields
from danlu.spec.model import Model

_NORMS = {
    "mlp_norm": "pre_feedforward_layernorm",
    "attention_post_norm": "post_attention_layernorm",
    "mlp_post_norm": "post_feedforward_layernorm",
}

_DEFAULTS: dict[str, Any] = {
    **{key: value for key, value in COMMON_DEFAULTS.items() if key != "hidden_act"},
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "use_bidirectional_attention": False,
    "cache_implementation": None,
}
_ONLY_VALUES: dict[str, Any] = {
    **{key: value for key, value in ONLY_VALUES.items() if key != "hidden_act"},
    "hidden_activation": "gelu_pytorch_tanh",
    "use_bidirectional_attention": False,
}


class Gemma2(ModelFamily):
    """`Gemma2ForCausalLM`."""

    model_type = "gemma2"
    architecture = "Gemma2ForCausalLM"
    title = "Gemma 2"
    names = (
        *ENDS,
        *(pair for pair in ATTENTION if "mlp_norm" not in pair.danlu),
        *(TensorNamePair(f"{BLOCK}.{own}.weight", f"{LAYER}.{theirs}.weight") for own, theirs in _NORMS.items()),
        *DENSE,
    )
    defaults = _DEFAULTS
    kinds = COMMON_KINDS | {
        "query_pre_attn_scalar": "number",
        "attn_logit_softcapping": "number",
        "final_logit_softcapping": "number",
    }
    only_values = _ONLY_VALUES
    traits: ClassVar[Collection[str]] = ("geglu", "zero_centered_norm", "post_norms", "scaled_embedding", "window")
    optional_traits: ClassVar[Collection[str]] = ("window.mixed", "query_scalar", "score_softcap", "logit_softcap")
    period: ClassVar[int] = 2
    """Layers from one without a window to the next, where no key says it."""

    def model_fields(self, config: HFConfig) -> dict[str, Any]:
        """With its norms, scales and caps."""
        return super().model_fields(config) | {
            "zero_centered_norm": True,
            "post_norms": True,
            "scaled_embedding": True,
            "activation": "geglu",
            "query_scalar": config.get("query_pre_attn_scalar"),
            "score_softcap": config.get("attn_logit_softcapping"),
            "logit_softcap": config.get("final_logit_softcapping"),
        }

    def default_kinds(self, config: HFConfig, layers: int) -> list[str]:
        """Of a configuration without `layer_types`."""
        return [FULL if layer % self.period == self.period - 1 else SLIDING for layer in range(layers)]

    def config_values(self, model: Model) -> dict[str, Any]:
        """With its norms, scales and caps."""
        values = super().config_values(model)
        del values["hidden_act"]
        scalar = model.query_scalar or model.head_dim
        return values | {
            "hidden_activation": "gelu_pytorch_tanh",
            "query_pre_attn_scalar": int(scalar) if float(scalar).is_integer() else scalar,
            "attn_logit_softcapping": model.score_softcap,
            "final_logit_softcapping": model.logit_softcap,
            "sliding_window": model.window,
            "layer_types": layer_kinds(model),
        }


class Gemma3(Gemma2):
    """`Gemma3ForCausalLM`, which knows text alone."""

    model_type = "gemma3_text"
    architecture = "Gemma3ForCausalLM"
    title = "Gemma 3"
    defaults = Gemma2.defaults | {
        "rope_theta": 1_000_000.0,
        "rope_local_base_freq": 10_000.0,
        "sliding_window_pattern": 6,
        "_sliding_window_pattern": 6,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
    }
    kinds = Gemma2.kinds | {
        "rope_local_base_freq": "number",
        "sliding_window_pattern": "number",
        "rope_parameters": "ropes",
    }
    # transformers has the key, and does not compute it.
    only_values = Gemma2.only_values | {"attn_logit_softcapping": None}
    traits = (*Gemma2.traits, "qk_norm")
    optional_traits = ("window.mixed", "query_scalar", "logit_softcap", "local_rope_theta")

    def model_fields(self, config: HFConfig) -> dict[str, Any]:
        """With the norms of queries and keys."""
        return super().model_fields(config) | {"qk_norm": True}

    def window_fields(self, config: HFConfig) -> dict[str, Any]:
        """Layers with a window have positions of their own, so that even a long window is kept."""
        return window_fields(config, self.layer_kinds(config), keep_long=True)

    def default_kinds(self, config: HFConfig, layers: int) -> list[str]:
        """By the older key, which may be written."""
        period = int(config.get("sliding_window_pattern")) or layers + 1
        return [FULL if layer % period == period - 1 else SLIDING for layer in range(layers)]

    def rope_fields(self, config: HFConfig) -> dict[str, Any]:
        """Of both kinds of layers; those with a window are never scaled."""
        tables = config.values.get("rope_parameters")
        if not tables:
            return rope_fields(config) | {"local_rope_theta": float(config.get("rope_local_base_freq"))}
        local = dict(tables.get(SLIDING) or {})
        if local.get("rope_type", "default") != "default":
            config.add_unsupported("rope_parameters", f'only rope_type = "default" for {SLIDING}')
        theta = local.get("rope_theta", config.get("rope_local_base_freq"))
        return rope_fields(config, dict(tables.get(FULL) or {})) | {"local_rope_theta": float(theta)}

    def config_values(self, model: Model) -> dict[str, Any]:
        """With the positions of layers with a window, in the older spelling."""
        values = super().config_values(model)
        del values["attn_logit_softcapping"]
        return values | {"rope_local_base_freq": model.local_rope_theta or model.rope_theta}
