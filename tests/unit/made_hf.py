"""Small random models made by `transformers` itself, one a family."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="models to compare with are made by transformers")

SHAPE: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

GPT_OSS_YARN = {
    "rope_type": "yarn",
    "rope_theta": 150_000.0,
    "factor": 8.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 64,
}
GEMMA3_LAYERS = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]

Make = Callable[..., Any]


def _llama(**changes: Any) -> Any:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE | changes))


def _mistral(**changes: Any) -> Any:
    return transformers.MistralForCausalLM(transformers.MistralConfig(**SHAPE | {"sliding_window": None} | changes))


def _qwen2(**changes: Any) -> Any:
    return transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**SHAPE | changes))


def _qwen3(**changes: Any) -> Any:
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SHAPE | {"head_dim": 16} | changes))


def _mixtral(**changes: Any) -> Any:
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**SHAPE | {"num_local_experts": 4} | changes))


DEEPSEEK_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 0.8,
    "original_max_position_embeddings": 64,
}


def _deepseek_v3(**changes: Any) -> Any:
    own = {
        "num_hidden_layers": 3,
        "num_key_value_heads": 4,
        "moe_intermediate_size": 20,
        "n_shared_experts": 2,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "n_group": 4,
        "topk_group": 2,
        "first_k_dense_replace": 1,
        "q_lora_rank": 24,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 12,
        "v_head_dim": 10,
        "num_mtp_layers": 0,
    }
    return transformers.DeepseekV3ForCausalLM(transformers.DeepseekV3Config(**SHAPE | own | changes))


GEMMA: dict[str, Any] = {"head_dim": 12, "num_hidden_layers": 4, "sliding_window": 24, "query_pre_attn_scalar": 10}


def _gemma2(**changes: Any) -> Any:
    return transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**SHAPE | GEMMA | changes))


def _gemma3(**changes: Any) -> Any:
    return transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(**SHAPE | GEMMA | changes))


def _gpt_oss(**changes: Any) -> Any:
    own = {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 24}
    own |= {"num_hidden_layers": 3, "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0}}
    return transformers.GptOssForCausalLM(transformers.GptOssConfig(**SHAPE | own | changes))


FAMILIES: dict[str, Make] = {
    "llama": _llama,
    "mistral": _mistral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "mixtral": _mixtral,
    "deepseek_v3": _deepseek_v3,
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
    "gpt_oss": _gpt_oss,
}

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama tied": ("llama", {"tie_word_embeddings": True}),
    "llama with biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, long context": ("llama", {"rope_parameters": LLAMA3}),
    "mistral": ("mistral", {}),
    "mistral tied, head of its own width": ("mistral", {"tie_word_embeddings": True, "head_dim": 12}),
    "mistral, window as long as the model": ("mistral", {"sliding_window": 512}),
    "qwen2": ("qwen2", {}),
    "qwen2 tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {}),
    "qwen3 tied": ("qwen3", {"tie_word_embeddings": True}),
    "mixtral": ("mixtral", {}),
    "mixtral tied": ("mixtral", {"tie_word_embeddings": True}),
    "deepseek v3": ("deepseek_v3", {}),
    "deepseek v3 tied, long context": (
        "deepseek_v3",
        {"tie_word_embeddings": True, "rope_parameters": DEEPSEEK_YARN, "norm_topk_prob": False},
    ),
    "deepseek v3, queries direct": ("deepseek_v3", {"q_lora_rank": None, "n_group": 1, "topk_group": 1}),
    "llama, yarn": ("llama", {"rope_parameters": DEEPSEEK_YARN | {"mscale_all_dim": 0.5}}),
    "mistral with a window": ("mistral", {"sliding_window": 40}),
    "mixtral with a window": ("mixtral", {"sliding_window": 40}),
    "qwen2, windows after the first layer": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 40, "max_window_layers": 1},
    ),
    "qwen3, every second layer with a window": (
        "qwen3",
        {
            "use_sliding_window": True,
            "sliding_window": 40,
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
    ),
    "gpt-oss": ("gpt_oss", {}),
    "gpt-oss tied": ("gpt_oss", {"tie_word_embeddings": True}),
    "gpt-oss, long context": ("gpt_oss", {"rope_parameters": GPT_OSS_YARN}),
    "gemma2": ("gemma2", {"attn_logit_softcapping": 4.0, "final_logit_softcapping": 6.0}),
    "gemma2 with a head of its own": ("gemma2", {"tie_word_embeddings": False}),
    "gemma3": ("gemma3_text", {"layer_types": GEMMA3_LAYERS}),
    "gemma3, scaled positions, capped logits, head of its own": (
        "gemma3_text",
        {
            "layer_types": GEMMA3_LAYERS,
            "tie_word_embeddings": False,
            "final_logit_softcapping": 6.0,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5_000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
            },
        },
    ),
}
"""Every family tied and untied, and the traits that only some models of a family have."""


def make_hf(folder: Path, name: str = "llama", dtype: torch.dtype = torch.float32, **saving: Any) -> Path:
    """Write one of `MODELS` into `folder`, every parameter random and large enough that a slip would show."""
    family, changes = MODELS[name]
    generator = torch.Generator().manual_seed(len(name))
    transformers.logging.disable_progress_bar()
    model = FAMILIES[family](**changes)
    with torch.no_grad():
        for parameter in model.parameters():
            deviation = 0.3 if parameter.ndim == 1 else parameter.shape[-1] ** -0.5
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * deviation)
            if parameter.ndim == 1 and not family.startswith("gemma"):  # whose norms add it themselves
                parameter.add_(1.0)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(torch.randn(buffer.shape, generator=generator) * 0.2)
    model.to(dtype).save_pretrained(folder, **saving)
    (folder / "tokenizer.json").write_text('{"of": "the model"}')
    (folder / "special_tokens_map.json").write_text("{}")
    return folder
