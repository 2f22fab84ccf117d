"""Keys of `config.json` that most families share: what they become, their defaults, their types."""

from typing import Any, Literal

KeyKind = Literal["number", "boolean", "rope", "names", "ropes"]

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
}
"""Keys that a configuration may have, with their values where it does not."""

COMMON_KINDS: dict[str, KeyKind] = {
    **dict.fromkeys(REQUIRED_KEYS, "number"),
    "num_key_value_heads": "number",
    "head_dim": "number",
    "rope_theta": "number",
    "sliding_window": "number",
    "attention_dropout": "number",
    "tie_word_embeddings": "boolean",
    "attention_bias": "boolean",
    "mlp_bias": "boolean",
    "use_sliding_window": "boolean",
    "rope_scaling": "rope",
    "rope_parameters": "rope",
    "layer_types": "names",
}
"""Types of the values that are used."""

ONLY_VALUES: dict[str, Any] = {
    "hidden_act": "silu",
    "attention_dropout": 0.0,
    "partial_rotary_factor": 1.0,
    "quantization_config": None,
}
"""Keys that change what a model computes, with the only value that Danlu supports."""

IGNORED_KEYS = frozenset(
    [
        "_name_or_path",
        "attn_implementation",
        "architectures",
        "bos_token_id",
        "chunk_size_feed_forward",
        "dtype",
        "eos_token_id",
        "id2label",
        "initializer_range",
        "is_encoder_decoder",
        "label2id",
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
