"""gpt-oss: experts with biases and a clamped activation, sinks, and a window in every second layer."""

from typing import Any

from danlu.framework.hf.families.family import ModelFamily
from danlu.framework.hf.families.hf_config import HFConfig
from danlu.framework.hf.families.keys import COMMON_DEFAULTS, COMMON_KINDS, ONLY_VALUES
from danlu.framework.hf.families.tensor_names import ATTENTION, BLOCK, ENDS, LAYER, TensorNamePair
from danlu.framework.hf.families.windows import FULL, SLIDING, layer_kinds
from danlu.spec.model import Model

_EXPERTS = (
    *(TensorNamePair(f"{BLOCK}.mlp.router.gate.{kind}", f"{LAYER}.mlp.router.{kind}") for kind in ("weight", "bias")),
    *(
        TensorNamePair(f"{BLOCK}.mlp.experts.{name}{bias}", f"{LAYER}.mlp.experts.gate_up_proj{bias}", woven=part)
        for bias in ("", "_bias")
        for part, name in enumerate(("gate", "up"))
    ),
    *(
        TensorNamePair(f"{BLOCK}.mlp.experts.down{bias}", f"{LAYER}.mlp.experts.down_proj{bias}")
        for bias in ("", "_bias")
    ),
)
_SINKS = TensorNamePair(f"{BLOCK}.attention.sinks.weight", f"{LAYER}.self_attn.sinks")
_DEQUANTIZE = (
    "write it in bf16 first: AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, "
    "quantization_config=Mxfp4Config(dequantize=True)).save_pretrained(other)"
)


class GptOss(ModelFamily):
    """`GptOssForCausalLM`, in bf16 or fp32: published weights are MXFP4, and have to be dequantized first."""

    model_type = "gpt_oss"
    architecture = "GptOssForCausalLM"
    title = "gpt-oss"
    names = (*ENDS, *ATTENTION, _SINKS, *_EXPERTS)
    defaults = COMMON_DEFAULTS | {
        "num_key_value_heads": 8,
        "head_dim": 64,
        "rope_theta": 150_000.0,
        "sliding_window": 128,
        "attention_bias": True,
        "num_local_experts": 128,
        "num_experts_per_tok": 4,
        "experts_per_token": None,
        "initial_context_length": None,
        "router_aux_loss_coef": 0.001,
        "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0,
    }
    kinds = COMMON_KINDS | {
        "num_local_experts": "number",
        "num_experts_per_tok": "number",
        "router_aux_loss_coef": "number",
    }
    only_values = {key: value for key, value in ONLY_VALUES.items() if key != "quantization_config"} | {
        "attention_bias": True,
        "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0,
    }
    experts_key = "num_local_experts"
    traits = ("moe", "moe.bias", "bias", "sinks", "clamped_swiglu")
    optional_traits = ("window", "window.mixed")

    def model_fields(self, config: HFConfig) -> dict[str, Any]:
        """With experts, sinks and biases."""
        if config.values.get("quantization_config") is not None:
            config.add_unsupported("quantization_config", "no quantized weights", _DEQUANTIZE)
        fields = super().model_fields(config)
        rate = config.get("router_aux_loss_coef")
        moe = {
            "experts": config.get("num_local_experts"),
            "top_k": config.get("num_experts_per_tok"),
            "width": fields.pop("mlp_width"),
            "bias": True,
            "balance": "loss" if rate else "none",
            "balance_rate": float(rate or 0.0),
        }
        return fields | {"moe": moe, "sinks": True, "activation": "clamped_swiglu"}

    def bias_fields(self, config: HFConfig) -> dict[str, Any]:
        """On all projections of attention."""
        return {"bias": True}

    def rope_fields(self, config: HFConfig) -> dict[str, Any]:
        """As written: without a key, transformers would scale positions."""
        if not (config.values.get("rope_parameters") or config.values.get("rope_scaling")):
            message = "is missing, and the family scales positions then"
            config.problems.append(config.problem("rope_parameters", message, "use the published file"))
        return super().rope_fields(config)

    def default_kinds(self, config: HFConfig, layers: int) -> list[str]:
        """Every second layer has no window."""
        return [FULL if layer % 2 else SLIDING for layer in range(layers)]

    def config_values(self, model: Model) -> dict[str, Any]:
        """With experts and windows, and positions in the newer spelling: nothing would mean scaled ones."""
        assert model.moe is not None
        values = super().config_values(model)
        scaling = values.pop("rope_scaling") or {"rope_type": "default"}
        return values | {
            "rope_parameters": scaling | {"rope_theta": values.pop("rope_theta")},
            "intermediate_size": model.moe.width,
            "num_local_experts": model.moe.experts,
            "num_experts_per_tok": model.moe.top_k,
            "router_aux_loss_coef": model.moe.balance_rate if model.moe.balance == "loss" else 0.0,
            "attention_bias": True,
            "sliding_window": model.window,
            "layer_types": layer_kinds(model),
        }
