"""Mixtral: experts in every layer, stored one by one or stacked."""

from typing import Any

from danlu.framework.hf.families.family import ModelFamily
from danlu.framework.hf.families.hf_config import HFConfig
from danlu.framework.hf.families.keys import COMMON_DEFAULTS, COMMON_KINDS, ONLY_VALUES
from danlu.framework.hf.families.tensor_names import ATTENTION, BLOCK, ENDS, LAYER, TensorNamePair
from danlu.spec.model import Model

_EXPERTS = (
    TensorNamePair(
        f"{BLOCK}.mlp.router.gate.weight", f"{LAYER}.block_sparse_moe.gate.weight", f"{LAYER}.mlp.gate.weight"
    ),
    *(
        TensorNamePair(
            f"{BLOCK}.mlp.experts.{matrix}",
            f"{LAYER}.block_sparse_moe.experts.{{expert}}.{theirs}.weight",
            f"{LAYER}.mlp.experts.{'down_proj' if matrix == 'down' else 'gate_up_proj'}",
        )
        for matrix, theirs in (("gate", "w1"), ("up", "w3"), ("down", "w2"))
    ),
)


class Mixtral(ModelFamily):
    """`MixtralForCausalLM`."""

    model_type = "mixtral"
    architecture = "MixtralForCausalLM"
    title = "Mixtral"
    names = (*ENDS, *ATTENTION, *_EXPERTS)
    defaults = COMMON_DEFAULTS | {
        "num_key_value_heads": 8,
        "rope_theta": 1_000_000.0,
        "router_jitter_noise": 0.0,
        "router_aux_loss_coef": 0.001,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    }
    kinds = COMMON_KINDS | {
        "router_jitter_noise": "number",
        "router_aux_loss_coef": "number",
        "num_local_experts": "number",
        "num_experts_per_tok": "number",
    }
    only_values = ONLY_VALUES | {"router_jitter_noise": 0.0}
    experts_key = "num_local_experts"
    traits = ("moe",)
    optional_traits = ("window",)

    def model_fields(self, config: HFConfig) -> dict[str, Any]:
        """With the experts."""
        fields = super().model_fields(config)
        rate = config.get("router_aux_loss_coef")
        fields["moe"] = {
            "experts": config.get("num_local_experts"),
            "top_k": config.get("num_experts_per_tok"),
            "width": fields.pop("mlp_width"),
            "balance": "loss" if rate else "none",
            "balance_rate": float(rate or 0.0),
        }
        return fields

    def config_values(self, model: Model) -> dict[str, Any]:
        """With the experts and the window."""
        assert model.moe is not None
        return super().config_values(model) | {
            "intermediate_size": model.moe.width,
            "num_local_experts": model.moe.experts,
            "num_experts_per_tok": model.moe.top_k,
            "router_aux_loss_coef": model.moe.balance_rate if model.moe.balance == "loss" else 0.0,
            "sliding_window": model.window,
        }
