"""The Hugging Face families that Danlu's decoder covers, as data: traits, names of tensors, keys of `config.json`."""

from dataclasses import dataclass, field
from typing import Any

from danlu.spec.model import Model


@dataclass(frozen=True)
class Name:
    """One kind of tensor by both its names; `{layer}` and `{expert}` stand for numbers."""

    danlu: str
    hf: str

    @property
    def stacked(self) -> bool:
        """Whether Danlu holds one tensor for all experts, each matrix transposed, where Hugging Face holds one each."""
        return "{expert}" in self.hf


_BLOCK, _LAYER = "blocks.{layer}", "model.layers.{layer}"
_ATTENTION = (
    Name(f"{_BLOCK}.attention_norm.weight", f"{_LAYER}.input_layernorm.weight"),
    *(
        Name(f"{_BLOCK}.attention.{letter}.{kind}", f"{_LAYER}.self_attn.{letter}_proj.{kind}")
        for letter in "qkvo"
        for kind in ("weight", "bias")
    ),
    Name(f"{_BLOCK}.attention.q_norm.weight", f"{_LAYER}.self_attn.q_norm.weight"),
    Name(f"{_BLOCK}.attention.k_norm.weight", f"{_LAYER}.self_attn.k_norm.weight"),
    Name(f"{_BLOCK}.mlp_norm.weight", f"{_LAYER}.post_attention_layernorm.weight"),
)
_DENSE = tuple(
    Name(f"{_BLOCK}.mlp.{matrix}.{kind}", f"{_LAYER}.mlp.{matrix}_proj.{kind}")
    for matrix in ("gate", "up", "down")
    for kind in ("weight", "bias")
)
_EXPERTS = (
    Name(f"{_BLOCK}.mlp.router.gate.weight", f"{_LAYER}.block_sparse_moe.gate.weight"),
    Name(f"{_BLOCK}.mlp.experts.gate", f"{_LAYER}.block_sparse_moe.experts.{{expert}}.w1.weight"),
    Name(f"{_BLOCK}.mlp.experts.up", f"{_LAYER}.block_sparse_moe.experts.{{expert}}.w3.weight"),
    Name(f"{_BLOCK}.mlp.experts.down", f"{_LAYER}.block_sparse_moe.experts.{{expert}}.w2.weight"),
)
_ENDS = (
    Name("embed.token.weight", "model.embed_tokens.weight"),
    Name("head.norm.weight", "model.norm.weight"),
    Name("head.score.weight", "lm_head.weight"),
)


@dataclass(frozen=True)
class Family:
    """One `model_type`; a parameter that a model does not have has no tensor, whatever the table of names holds."""

    model_type: str
    architecture: str
    names: tuple[Name, ...] = (*_ENDS, *_ATTENTION, *_DENSE)
    defaults: dict[str, Any] = field(default_factory=dict)
    """What its configurations mean by leaving a key out, where that differs from `COMMON_DEFAULTS`."""
    fixed: dict[str, Any] = field(default_factory=dict)
    """Fields of a `Model` that every model of the family has, and no other family without them."""


COMMON_DEFAULTS: dict[str, Any] = {
    "num_key_value_heads": None,
    "head_dim": None,
    "hidden_act": "silu",
    "rope_theta": 10_000.0,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "sliding_window": None,
    "use_sliding_window": None,
    "layer_types": None,
    "attention_dropout": 0.0,
    "router_jitter_noise": 0.0,
    "router_aux_loss_coef": 0.001,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}

FAMILIES = {
    family.model_type: family
    for family in (
        Family("llama", "LlamaForCausalLM"),
        Family("mistral", "MistralForCausalLM", defaults={"num_key_value_heads": 8, "sliding_window": 4096}),
        Family(
            "qwen2",
            "Qwen2ForCausalLM",
            defaults={"num_key_value_heads": 32, "use_sliding_window": False, "sliding_window": 4096},
            fixed={"qkv_bias": True},
        ),
        Family(
            "qwen3",
            "Qwen3ForCausalLM",
            defaults={
                "num_key_value_heads": 32,
                "head_dim": 128,
                "use_sliding_window": False,
                "sliding_window": 4096,
            },
            fixed={"qk_norm": True},
        ),
        Family(
            "mixtral",
            "MixtralForCausalLM",
            names=(*_ENDS, *_ATTENTION, *_EXPERTS),
            defaults={"num_key_value_heads": 8, "rope_theta": 1_000_000.0},
        ),
    )
}

NEEDED = {
    "vocab_size": "vocabulary",
    "num_hidden_layers": "layers",
    "hidden_size": "width",
    "num_attention_heads": "heads",
    "intermediate_size": "mlp_width",
    "max_position_embeddings": "sequence",
    "rms_norm_eps": "norm_epsilon",
}
"""Keys that every configuration has, and the fields of a `Model` they become."""

WITHOUT_EFFECT = frozenset(
    [
        "_name_or_path",
        "architectures",
        "bos_token_id",
        "chunk_size_feed_forward",
        "dtype",
        "eos_token_id",
        "id2label",
        "initializer_range",
        "is_encoder_decoder",
        "label2id",
        "max_window_layers",
        "model_type",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "pad_token_id",
        "pretraining_tp",
        "problem_type",
        "return_dict",
        "torch_dtype",
        "transformers_version",
        "use_cache",
    ]
)
"""Keys that do not change what a model computes: tokens of the tokenizer, dtypes of the files, outputs to hand back."""


def without_family(model: Model) -> str:
    """The trait for which no covered family has a place; empty if there is none."""
    moe = model.moe
    traits = {
        f'norm = "{model.norm}"': model.norm != "rms",
        f'position = "{model.position}"': model.position != "rope",
        f'activation = "{model.activation}"': model.activation != "swiglu",
        "qkv_bias and qk_norm together": model.qkv_bias and model.qk_norm,
        "bias and qk_norm together": model.bias and model.qk_norm,
    }
    if moe is not None:
        traits |= {
            "bias in a model of experts": model.bias or model.qkv_bias,
            "qk_norm in a model of experts": model.qk_norm,
            f"moe.shared = {moe.shared}": moe.shared > 0,
            f"moe.dense_layers = {moe.dense_layers}": moe.dense_layers > 0,
            f'moe.score = "{moe.score}"': moe.score != "softmax",
            "moe.normalise = false": not moe.normalise,
            'moe.balance = "bias"': moe.balance == "bias",
        }
    return next((trait for trait, has in traits.items() if has), "")


def family_of(model: Model) -> Family | None:
    """The family whose form a model has: the one it was imported from if that still fits, else by its traits."""
    if without_family(model):
        return None
    if model.moe is not None:
        return FAMILIES["mixtral"]
    if model.qk_norm:
        return FAMILIES["qwen3"]
    if model.qkv_bias:
        return FAMILIES["qwen2"]
    if model.source.startswith(FAMILIES["mistral"].architecture) and not model.bias:
        return FAMILIES["mistral"]
    return FAMILIES["llama"]
