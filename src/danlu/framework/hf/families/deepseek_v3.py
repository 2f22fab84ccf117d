"""DeepSeek-V3: latent attention, and experts in groups with a bias that balances their choice."""

from typing import Any

from danlu.framework.hf.families.family import ModelFamily
from danlu.framework.hf.families.hf_config import HFConfig
from danlu.framework.hf.families.keys import COMMON_DEFAULTS, COMMON_KINDS, ONLY_VALUES, KeyKind
from danlu.framework.hf.families.rope import rope_fields, rope_values
from danlu.framework.hf.families.tensor_names import BLOCK, DENSE, ENDS, LAYER, MODULE, TensorNamePair
from danlu.spec.model import Model

_MLA_KEYS = ("q_lora_rank", "kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
_MOE_KEYS = {
    "n_routed_experts": "experts",
    "num_experts_per_tok": "top_k",
    "moe_intermediate_size": "width",
    "n_shared_experts": "shared",
    "first_k_dense_replace": "dense_layers",
    "norm_topk_prob": "normalize",
    "routed_scaling_factor": "routed_scaling_factor",
    "n_group": "n_group",
    "topk_group": "topk_group",
}
"""Keys of the experts, and the fields of a `Moe` they become."""
_NUMBERS = (*_MLA_KEYS, *(key for key in _MOE_KEYS if key != "norm_topk_prob"))
_KINDS: dict[str, KeyKind] = {
    **COMMON_KINDS,
    **dict.fromkeys(_NUMBERS, "number"),
    "norm_topk_prob": "boolean",
    "rope_interleave": "boolean",
}
BIAS_UPDATE_RATE = 0.001
"""Update of the bias per step that DeepSeek-V3's report has; `config.json` has no key for it."""

_ATTENTION = (
    TensorNamePair(f"{BLOCK}.attention_norm.weight", f"{LAYER}.input_layernorm.weight"),
    *(
        TensorNamePair(f"{BLOCK}.attention.{name}.weight", f"{LAYER}.self_attn.{theirs}.weight")
        for name, theirs in (
            ("q", "q_proj"),
            ("q_a", "q_a_proj"),
            ("q_a_norm", "q_a_layernorm"),
            ("q_b", "q_b_proj"),
            ("kv_a", "kv_a_proj_with_mqa"),
            ("kv_a_norm", "kv_a_layernorm"),
            ("kv_b", "kv_b_proj"),
            ("o", "o_proj"),
        )
    ),
    TensorNamePair(f"{BLOCK}.mlp_norm.weight", f"{LAYER}.post_attention_layernorm.weight"),
)
_EXPERTS = (
    TensorNamePair(f"{BLOCK}.mlp.router.gate.weight", f"{LAYER}.mlp.gate.weight"),
    TensorNamePair(f"{BLOCK}.mlp.router.bias_E", f"{LAYER}.mlp.gate.e_score_correction_bias"),
    *(
        TensorNamePair(
            f"{BLOCK}.mlp.experts.{matrix}",
            f"{LAYER}.mlp.experts.{{expert}}.{matrix}_proj.weight",
            f"{LAYER}.mlp.experts.{'down_proj' if matrix == 'down' else 'gate_up_proj'}",
        )
        for matrix in ("gate", "up", "down")
    ),
    *(
        TensorNamePair(f"{BLOCK}.mlp.shared.{matrix}.weight", f"{LAYER}.mlp.shared_experts.{matrix}_proj.weight")
        for matrix in ("gate", "up", "down")
    ),
)


_MTP = (
    *(
        TensorNamePair(f"{MODULE}.{name}.weight", f"{LAYER}.{theirs}.weight")
        for name, theirs in (
            ("embed_norm", "enorm"),
            ("hidden_norm", "hnorm"),
            ("project", "eh_proj"),
            ("norm", "shared_head.norm"),
        )
    ),
    # A module's folder has copies of the two tables that it shares with the model.
    TensorNamePair("embed.token.weight", f"{LAYER}.embed_tokens.weight"),
    TensorNamePair("head.score.weight", f"{LAYER}.shared_head.head.weight"),
)


class DeepseekV3(ModelFamily):
    """`DeepseekV3ForCausalLM`; its layers for multi-token prediction are imported if asked for, and exported."""

    model_type = "deepseek_v3"
    architecture = "DeepseekV3ForCausalLM"
    title = "DeepSeek-V3"
    names = (*ENDS, *_ATTENTION, *DENSE, *_EXPERTS)
    mtp_names = _MTP
    defaults = COMMON_DEFAULTS | {
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "n_routed_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 2048,
        "n_shared_experts": 1,
        "first_k_dense_replace": 3,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "n_group": 8,
        "topk_group": 4,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "moe_layer_freq": 1,
        "rope_interleave": True,
        "num_nextn_predict_layers": 1,
        "num_mtp_layers": 1,
        # Of the code that DeepSeek published beside the weights, or that follow from other keys.
        "auto_map": None,
        "aux_loss_alpha": None,
        "seq_aux": None,
        "ep_size": 1,
        "qk_head_dim": None,
    }
    kinds = _KINDS
    only_values = ONLY_VALUES | {
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "moe_layer_freq": 1,
        "rope_interleave": True,
        "ep_size": 1,
    }
    experts_key = "n_routed_experts"
    left_out_title = "layers for multi-token prediction (--mtp imports them)"
    traits = ("mla", "moe", "moe.shared", "moe.score")
    optional_traits = (
        "moe.dense_layers",
        "moe.normalize",
        "moe.balance",
        "moe.routed_scaling_factor",
        "moe.n_group",
    )

    def model_fields(self, config: HFConfig) -> dict[str, Any]:
        """With latent attention and the experts."""
        fields = {field: config.get(key) for key, field in self.required_keys.items()}
        fields |= self.bias_fields(config) | rope_fields(config) | {"tied": config.get("tie_word_embeddings")}
        fields["mla"] = {key: value for key in _MLA_KEYS if (value := config.get(key)) is not None}
        moe = {field: config.get(key) for key, field in _MOE_KEYS.items()}
        moe |= {"routed_scaling_factor": float(moe["routed_scaling_factor"]), "score": "sigmoid"}
        fields["moe"] = moe | {"balance": "bias", "balance_rate": BIAS_UPDATE_RATE}
        return fields

    def config_values(self, model: Model) -> dict[str, Any]:
        """With latent attention and the experts."""
        assert model.mla is not None
        assert model.moe is not None
        values: dict[str, Any] = {key: getattr(model, field) for key, field in self.required_keys.items()}
        values |= {"intermediate_size": model.mlp_dim, "hidden_act": "silu", "attention_bias": False}
        values |= {"num_key_value_heads": model.heads, "tie_word_embeddings": model.tied}
        values |= {key: getattr(model.mla, key) for key in _MLA_KEYS}
        values |= {key: getattr(model.moe, field) for key, field in _MOE_KEYS.items()}
        values |= {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1}
        return values | {"num_nextn_predict_layers": model.mtp_depth} | rope_values(model)

    def is_redundant(self, name: str, model: Model) -> bool:
        """Also the layers for multi-token prediction, which come after the model's."""
        return super().is_redundant(name, model) or self.is_left_out(name, model)

    def is_left_out(self, name: str, model: Model) -> bool:
        """Layers for multi-token prediction, which come after the model's, beyond those that the model has."""
        parts, kept = name.split("."), model.layers + model.mtp_depth
        return parts[:2] == ["model", "layers"] and parts[2].isdigit() and int(parts[2]) >= kept
