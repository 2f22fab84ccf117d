"""`config.json` of a Hugging Face model into a `Model`, and back. What cannot be carried over exactly is an error."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from danlu.framework.hf_families import COMMON_DEFAULTS, FAMILIES, NEEDED, WITHOUT_EFFECT, Family
from danlu.spec.model import Model
from danlu.spec.problem import Problem, SpecError, nearest, problem_at, shown

CONFIG = "config.json"

_ONLY: dict[str, Any] = {
    "hidden_act": "silu",
    "attention_dropout": 0.0,
    "router_jitter_noise": 0.0,
    "partial_rotary_factor": 1.0,
    "quantization_config": None,
}
"""Keys that change what a model computes, with the one value that Danlu computes too."""

_ROPE = ("rope_theta", "rope_scaling", "rope_parameters")
_LLAMA3 = {
    "factor": "factor",
    "low_freq_factor": "low",
    "high_freq_factor": "high",
    "original_max_position_embeddings": "original",
}


@dataclass
class Config:
    """A `config.json` as it was read, with what is found wrong with it."""

    path: Path
    text: str
    values: dict[str, Any]
    family: Family
    problems: list[Problem] = field(default_factory=list)

    def get(self, key: str) -> Any:
        """A value, or what this family means by leaving it out."""
        return self.values.get(key, (COMMON_DEFAULTS | self.family.defaults).get(key))

    def refuse(self, key: str, supported: str, suggestion: str = "") -> None:
        """Say that a value cannot be carried over, and what can."""
        message = f"is {shown(self.get(key))}, but Danlu's model has {supported}"
        self.problems.append(problem_at(self.path, _line(self.text, key), key, message, suggestion))


def read_config(path: Path) -> Config:
    """Read a `config.json` of one of the covered families."""
    try:
        text = path.read_text("utf-8")
        values = json.loads(text)
    except FileNotFoundError:
        message = "does not exist"
        raise SpecError([problem_at(path, 1, "file", message, "the folder of a Hugging Face model")]) from None
    except json.JSONDecodeError as error:
        raise SpecError([problem_at(path, error.lineno, "syntax", f"is not JSON: {error.msg}")]) from None
    kind = values.get("model_type") if isinstance(values, dict) else None
    if kind not in FAMILIES:
        message = f"is {shown(kind)}, but must be one of {', '.join(FAMILIES)}"
        hint = nearest(str(kind), list(FAMILIES))
        raise SpecError([problem_at(path, _line(text, "model_type"), "model_type", message, hint)])
    return Config(path, text, values, FAMILIES[kind])


def to_model(config: Config, name: str) -> Model:
    """The shape that a configuration describes; raises `SpecError` with everything that cannot be carried over."""
    for key in NEEDED:
        if config.get(key) is None:
            config.problems.append(problem_at(config.path, 1, key, "is missing", f"add `{key}`"))
    for key, only in _ONLY.items():
        if config.get(key) not in (only, None):
            config.refuse(key, f"only {shown(only)}" if only is not None else "no place for it")
    _refuse_windows(config)
    fields: dict[str, Any] = {field: config.get(key) for key, field in NEEDED.items()}
    fields |= config.family.fixed | _biases(config) | _rope(config)
    fields |= {"kv_heads": config.get("num_key_value_heads") or fields["heads"], "head_width": config.get("head_dim")}
    fields |= {"tied": config.get("tie_word_embeddings"), "name": name}
    fields["source"] = f"{config.family.architecture} in Hugging Face's form: {name}"
    if config.problems:
        raise SpecError(config.problems)
    fields["head_width"] = fields["head_width"] or fields["width"] // fields["heads"]
    if config.family.model_type == "mixtral":
        fields["moe"] = _experts(config, fields.pop("mlp_width"))
    return _validated(config, fields)


def unknown_keys(config: Config) -> list[str]:
    """Keys that Danlu does not know and leaves out, each with its value."""
    known = {*NEEDED, *COMMON_DEFAULTS, *WITHOUT_EFFECT, *_ONLY, *_ROPE}
    return [f"{key} = {shown(value)}" for key, value in config.values.items() if key not in known]


def to_config(model: Model, family: Family, dtype: str, carried: dict[str, Any]) -> dict[str, Any]:
    """The configuration of a model; what `carried`, an earlier one, says beside the shape (tokens, …) is kept."""
    values = {key: value for key, value in carried.items() if key not in (*_ROPE, "dtype", "torch_dtype")}
    values |= {"architectures": [family.architecture], "model_type": family.model_type}
    values |= {key: getattr(model, field) for key, field in NEEDED.items()}
    values |= {"intermediate_size": model.moe.width if model.moe else model.mlp, "hidden_act": "silu"}
    values |= {"num_key_value_heads": model.key_value_heads, "head_dim": model.head}
    values |= {"tie_word_embeddings": model.tied, "rope_theta": model.rope_theta}
    # The older spelling of dtype and positions, because every version reads it.
    values |= {"torch_dtype": dtype, "rope_scaling": None}
    if (scaling := model.rope_scaling) is not None:
        values["rope_scaling"] = {"rope_type": scaling.kind}
        values["rope_scaling"] |= {key: getattr(scaling, field) for key, field in _LLAMA3.items()}
    if family.model_type == "llama":
        values |= {"attention_bias": model.bias, "mlp_bias": model.bias}
    if family.model_type == "qwen3":
        values |= {"attention_bias": False}
    # A window that was as long as the model when it came in need not be so any more.
    values.pop("layer_types", None)
    if family.model_type != "llama":
        values["sliding_window"] = None
    if family.model_type in ("qwen2", "qwen3"):
        values["use_sliding_window"] = False
    if model.moe is not None:
        values |= {"num_local_experts": model.moe.experts, "num_experts_per_tok": model.moe.top_k}
        values |= {"router_aux_loss_coef": model.moe.balance_rate if model.moe.balance == "loss" else 0.0}
    return values


def _experts(config: Config, width: int) -> dict[str, Any]:
    rate = config.get("router_aux_loss_coef")
    return {
        "experts": config.get("num_local_experts"),
        "top_k": config.get("num_experts_per_tok"),
        "width": width,
        "balance": "loss" if rate else "none",
        "balance_rate": float(rate),
    }


def _refuse_windows(config: Config) -> None:
    """Attention over a window is attention over all positions only if the window is as long as the model."""
    window, longest = config.get("sliding_window"), config.get("max_position_embeddings")
    kinds = set(config.get("layer_types") or ()) - {"full_attention", "sliding_attention"}
    if kinds:
        config.refuse("layer_types", "only full attention in every layer")
    in_use = config.get("use_sliding_window") is not False or "sliding_attention" in (config.get("layer_types") or ())
    if in_use and window is not None and longest is not None and window < longest:
        config.refuse(
            "sliding_window",
            f"only attention over all positions, and max_position_embeddings is {longest}",
            f"sliding windows are not supported; with max_position_embeddings = {window} the two are the same",
        )


def _biases(config: Config) -> dict[str, Any]:
    """Biases are on all projections or on none, beside those a family has of its own."""
    attention, mlp = bool(config.get("attention_bias")), bool(config.get("mlp_bias"))
    if config.family.model_type == "llama" and attention == mlp:
        return {"bias": attention}
    for key, wanted in (("attention_bias", attention), ("mlp_bias", mlp)):
        if wanted:
            both = config.family.model_type == "llama"
            config.refuse(
                key, "biases on attention and feed-forward network together, or on neither" if both else "none here"
            )
    return {}


def _rope(config: Config) -> dict[str, Any]:
    """Rotary positions, from the older spelling (`rope_theta`, `rope_scaling`) or the newer (`rope_parameters`)."""
    key = "rope_parameters" if config.values.get("rope_parameters") else "rope_scaling"
    table = dict(config.values.get(key) or {})
    theta = float(table.pop("rope_theta", config.get("rope_theta")))
    kind = table.pop("rope_type", table.pop("type", "default"))
    table.pop("type", None)
    if table.pop("partial_rotary_factor", 1.0) != 1.0:
        config.refuse(key, "rotary positions on whole heads only: partial_rotary_factor = 1.0")
    if kind == "default":
        return {"rope_theta": theta}
    unknown = set(table) ^ set(_LLAMA3)
    if kind != "llama3" or unknown:
        hint = f"the keys of llama3 are {', '.join(_LLAMA3)}" if kind == "llama3" else ""
        config.refuse(key, 'rotary positions of type "default" and "llama3" only', hint)
        return {}
    scaling: dict[str, Any] = {field: float(table[key]) for key, field in _LLAMA3.items()}
    return {"rope_theta": theta, "rope_scaling": scaling | {"kind": kind, "original": int(scaling["original"])}}


def _validated(config: Config, fields: dict[str, Any]) -> Model:
    try:
        return Model.model_validate(fields)
    except ValidationError as error:
        keys = {field: key for key, field in NEEDED.items()}
        problems = []
        for detail in error.errors(include_url=False):
            key = ".".join(keys.get(str(part), str(part)) for part in detail["loc"]) or "file"
            message = f"is {shown(detail['input'])}: {detail['msg']}" if detail["loc"] else detail["msg"]
            problems.append(problem_at(config.path, _line(config.text, key), key, message))
        raise SpecError(problems) from None


def _line(text: str, key: str) -> int:
    """The line that a key stands in; 1 if the file leaves it out."""
    lines = text.splitlines()
    return next((number for number, line in enumerate(lines, start=1) if f'"{key}"' in line), 1)
