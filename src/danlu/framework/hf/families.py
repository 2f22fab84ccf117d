"""The Hugging Face families that Danlu's decoder supports, as data: traits, tensor names, keys of `config.json`."""

from dataclasses import dataclass, field
from typing import Any

from danlu.spec.model import Model


@dataclass(frozen=True)
class TensorNamePair:
    """One kind of tensor by both its names; `{layer}` and `{expert}` are indices."""

    danlu: str
    hf: str

    @property
    def stacked(self) -> bool:
        """Whether Danlu has one tensor for all experts, each matrix transposed, and Hugging Face one per expert."""
        return "{expert}" in self.hf


_BLOCK, _LAYER = "blocks.{layer}", "model.layers.{layer}"
_ATTENTION = (
    TensorNamePair(f"{_BLOCK}.attention_norm.weight", f"{_LAYER}.input_layernorm.weight"),
    *(
        TensorNamePair(f"{_BLOCK}.attention.{letter}.{kind}", f"{_LAYER}.self_attn.{letter}_proj.{kind}")
        for letter in "qkvo"
        for kind in ("weight", "bias")
    ),
    TensorNamePair(f"{_BLOCK}.attention.q_norm.weight", f"{_LAYER}.self_attn.q_norm.weight"),
    TensorNamePair(f"{_BLOCK}.attention.k_norm.weight", f"{_LAYER}.self_attn.k_norm.weight"),
    TensorNamePair(f"{_BLOCK}.mlp_norm.weight", f"{_LAYER}.post_attention_layernorm.weight"),
)
_DENSE = tuple(
    TensorNamePair(f"{_BLOCK}.mlp.{matrix}.{kind}", f"{_LAYER}.mlp.{matrix}_proj.{kind}")
    for matrix in ("gate", "up", "down")
    for kind in ("weight", "bias")
)
_EXPERTS = (
    TensorNamePair(f"{_BLOCK}.mlp.router.gate.weight", f"{_LAYER}.block_sparse_moe.gate.weight"),
    TensorNamePair(f"{_BLOCK}.mlp.experts.gate", f"{_LAYER}.block_sparse_moe.experts.{{expert}}.w1.weight"),
    TensorNamePair(f"{_BLOCK}.mlp.experts.up", f"{_LAYER}.block_sparse_moe.experts.{{expert}}.w3.weight"),
    TensorNamePair(f"{_BLOCK}.mlp.experts.down", f"{_LAYER}.block_sparse_moe.experts.{{expert}}.w2.weight"),
)
_ENDS = (
    TensorNamePair("embed.token.weight", "model.embed_tokens.weight"),
    TensorNamePair("head.norm.weight", "model.norm.weight"),
    TensorNamePair("head.score.weight", "lm_head.weight"),
)


@dataclass(frozen=True)
class ModelFamily:
    """One `model_type`; the table of names may have more tensors than a model has parameters."""

    model_type: str
    architecture: str
    names: tuple[TensorNamePair, ...] = (*_ENDS, *_ATTENTION, *_DENSE)
    defaults: dict[str, Any] = field(default_factory=dict)
    """Its defaults for missing keys, where they differ from `COMMON_DEFAULTS`."""
    fixed_fields: dict[str, Any] = field(default_factory=dict)
    """Values of `Model` fields that only models of this family have."""


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
        ModelFamily("llama", "LlamaForCausalLM"),
        ModelFamily("mistral", "MistralForCausalLM", defaults={"num_key_value_heads": 8, "sliding_window": 4096}),
        ModelFamily(
            "qwen2",
            "Qwen2ForCausalLM",
            defaults={"num_key_value_heads": 32, "use_sliding_window": False, "sliding_window": 4096},
            fixed_fields={"qkv_bias": True},
        ),
        ModelFamily(
            "qwen3",
            "Qwen3ForCausalLM",
            defaults={
                "num_key_value_heads": 32,
                "head_dim": 128,
                "use_sliding_window": False,
                "sliding_window": 4096,
            },
            fixed_fields={"qk_norm": True},
        ),
        ModelFamily(
            "mixtral",
            "MixtralForCausalLM",
            names=(*_ENDS, *_ATTENTION, *_EXPERTS),
            defaults={"num_key_value_heads": 8, "rope_theta": 1_000_000.0},
        ),
    )
}

REQUIRED_KEYS = {
    "vocab_size": "vocabulary",
    "num_hidden_layers": "layers",
    "hidden_size": "width",
    "num_attention_heads": "heads",
    "intermediate_size": "mlp_width",
    "max_position_embeddings": "sequence",
    "rms_norm_eps": "norm_epsilon",
}
"""Keys that every configuration has, and the fields of a `Model` they become."""

IGNORED_KEYS = frozenset(
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
"""Keys that do not change what a model computes: special tokens, dtypes of the files, which outputs to return."""


def unsupported_trait(model: Model) -> str:
    """The trait that no supported family has; empty if there is none."""
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
            "bias in an MoE model": model.bias or model.qkv_bias,
            "qk_norm in an MoE model": model.qk_norm,
            f"moe.shared = {moe.shared}": moe.shared > 0,
            f"moe.dense_layers = {moe.dense_layers}": moe.dense_layers > 0,
            f'moe.score = "{moe.score}"': moe.score != "softmax",
            "moe.normalize = false": not moe.normalize,
            'moe.balance = "bias"': moe.balance == "bias",
        }
    return next((trait for trait, has in traits.items() if has), "")


def find_family(model: Model) -> ModelFamily | None:
    """The family that a model is exported as: the one it was imported from if that still fits, else by its traits."""
    if unsupported_trait(model):
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
