"""`config.json` of a Hugging Face model to a `Model`, and back. What cannot be converted exactly is an error."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from danlu.framework.hf.families import COMMON_DEFAULTS, FAMILIES, IGNORED_KEYS, REQUIRED_KEYS, ModelFamily
from danlu.spec.files import MAX_JSON_BYTES, parse_json, read_text
from danlu.spec.model import Model
from danlu.spec.names import MAX_LABEL_LENGTH
from danlu.spec.problem import Problem, SpecError, format_value, problem_at, suggest_name
from danlu.spec.text import one_line

CONFIG_FILE = "config.json"

_REQUIRED_VALUES: dict[str, Any] = {
    "hidden_act": "silu",
    "attention_dropout": 0.0,
    "router_jitter_noise": 0.0,
    "partial_rotary_factor": 1.0,
    "quantization_config": None,
}
"""Keys that change what a model computes, with the only value that Danlu supports."""

_ROPE = ("rope_theta", "rope_scaling", "rope_parameters")
_LLAMA3 = {
    "factor": "factor",
    "low_freq_factor": "low",
    "high_freq_factor": "high",
    "original_max_position_embeddings": "original",
}
_LARGEST = 10**18
"""Larger than any number of a configuration, and still exact enough to compute with."""
_NUMBERS = (
    *REQUIRED_KEYS,
    "num_key_value_heads",
    "head_dim",
    "rope_theta",
    "sliding_window",
    "attention_dropout",
    "router_jitter_noise",
    "router_aux_loss_coef",
    "num_local_experts",
    "num_experts_per_tok",
)
_BOOLEANS = ("tie_word_embeddings", "attention_bias", "mlp_bias", "use_sliding_window")
_TABLES = ("rope_scaling", "rope_parameters")


@dataclass
class HFConfig:
    """A `config.json` as it was read, with the problems found in it."""

    path: Path
    text: str
    values: dict[str, Any]
    family: ModelFamily
    problems: list[Problem] = field(default_factory=list)

    def get(self, key: str) -> Any:
        """A value, or the family's default for a missing key."""
        return self.values.get(key, (COMMON_DEFAULTS | self.family.defaults).get(key))

    def problem(self, key: str, message: str, suggestion: str = "") -> Problem:
        """A problem with one key, at its line."""
        return problem_at(self.path, _line(self.text, key), key, message, suggestion)

    def add_unsupported(self, key: str, supported: str, suggestion: str = "this model cannot be imported") -> None:
        """Add a problem: a value that is not supported, and what is."""
        message = f"is {format_value(self.get(key))}, but Danlu's model has {supported}"
        self.problems.append(problem_at(self.path, _line(self.text, key), key, message, suggestion))


def read_config(path: Path) -> HFConfig:
    """Read a `config.json` of one of the supported families."""
    try:
        text = read_text(path, MAX_JSON_BYTES)
    except FileNotFoundError:
        message = "does not exist"
        raise SpecError([problem_at(path, 1, "file", message, "the folder of a Hugging Face model")]) from None
    values = parse_json(text, path)
    kind = values.get("model_type") if isinstance(values, dict) else None
    if not isinstance(kind, str) or kind not in FAMILIES:
        message = f"is {format_value(kind)}, but must be one of {', '.join(FAMILIES)}"
        hint = suggest_name(str(kind), list(FAMILIES))
        raise SpecError([problem_at(path, _line(text, "model_type"), "model_type", message, hint)])
    return HFConfig(path, text, values, FAMILIES[kind])


def model_from_config(config: HFConfig, name: str) -> Model:
    """The shape that a configuration describes; raises `SpecError` with everything that is not supported."""
    for key in REQUIRED_KEYS:
        if config.get(key) is None:
            config.problems.append(problem_at(config.path, 1, key, "is missing", f"add `{key}`"))
    _check_kinds(config)
    if config.problems:
        raise SpecError(config.problems)
    for key, only in _REQUIRED_VALUES.items():
        if config.get(key) not in (only, None):
            config.add_unsupported(key, f"only {format_value(only)}" if only is not None else "no support for it")
    _refuse_windows(config)
    fields: dict[str, Any] = {field: config.get(key) for key, field in REQUIRED_KEYS.items()}
    fields |= config.family.fixed_fields | _biases(config) | _rope(config)
    fields |= {"kv_heads": config.get("num_key_value_heads") or fields["heads"], "head_width": config.get("head_dim")}
    name = one_line(name)[:MAX_LABEL_LENGTH] or "model"
    fields |= {"tied": config.get("tie_word_embeddings"), "name": name}
    fields["source"] = f"{config.family.architecture} in Hugging Face's form: {name}"
    if config.problems:
        raise SpecError(config.problems)
    if not fields["head_width"] and isinstance(fields["width"], int) and isinstance(fields["heads"], int):
        fields["head_width"] = max(1, fields["width"] // max(1, fields["heads"]))
    if config.family.model_type == "mixtral":
        fields["moe"] = _experts(config, fields.pop("mlp_width"))
    return _validated(config, fields)


def _check_kinds(config: HFConfig) -> None:
    """Add a problem for every value of the wrong type, before they are used."""
    for key, value in ((key, config.get(key)) for key in (*_NUMBERS, *_BOOLEANS, *_TABLES, "layer_types")):
        expected = ""
        if key in _NUMBERS and not (value is None or _is_number(value)):
            expected = "a number above 0"
        elif key in _BOOLEANS and not isinstance(value, bool | None):
            expected = "true or false"
        elif key in _TABLES and not (value is None or _is_rope_table(value)):
            expected = "a table of numbers and a type"
        elif key == "layer_types" and not (value is None or _is_texts(value)):
            expected = "a list of names"
        if expected:
            message = f"is {format_value(value)}, but must be {expected}"
            hint = "use the published file"
            config.problems.append(problem_at(config.path, _line(config.text, key), key, message, hint))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < _LARGEST


def _is_rope_table(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and all(inner is None or isinstance(inner, str | bool) or _is_number(inner) for inner in value.values())
        and all(_is_number(value.get(key, 1)) for key in ("rope_theta", *_LLAMA3))
    )


def _is_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(inner, str) for inner in value)


def unknown_keys(config: HFConfig) -> list[str]:
    """Keys that Danlu does not know and skips, each with its value."""
    known = {*REQUIRED_KEYS, *COMMON_DEFAULTS, *IGNORED_KEYS, *_REQUIRED_VALUES, *_ROPE}
    return [f"{key} = {format_value(value)}" for key, value in config.values.items() if key not in known]


def config_from_model(model: Model, family: ModelFamily, dtype: str, carried: dict[str, Any]) -> dict[str, Any]:
    """The configuration of a model; keys of `carried`, an earlier one, that are not about the shape are kept."""
    values = {key: value for key, value in carried.items() if key not in (*_ROPE, "dtype", "torch_dtype")}
    values |= {"architectures": [family.architecture], "model_type": family.model_type}
    values |= {key: getattr(model, field) for key, field in REQUIRED_KEYS.items()}
    values |= {"intermediate_size": model.moe.width if model.moe else model.mlp_dim, "hidden_act": "silu"}
    values |= {"num_key_value_heads": model.num_kv_heads, "head_dim": model.head_dim}
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
    # A window that was as long as the model at import may not be so now.
    values.pop("layer_types", None)
    if family.model_type != "llama":
        values["sliding_window"] = None
    if family.model_type in ("qwen2", "qwen3"):
        values["use_sliding_window"] = False
    if model.moe is not None:
        values |= {"num_local_experts": model.moe.experts, "num_experts_per_tok": model.moe.top_k}
        values |= {"router_aux_loss_coef": model.moe.balance_rate if model.moe.balance == "loss" else 0.0}
    return values


def _experts(config: HFConfig, width: int) -> dict[str, Any]:
    rate = config.get("router_aux_loss_coef")
    return {
        "experts": config.get("num_local_experts"),
        "top_k": config.get("num_experts_per_tok"),
        "width": width,
        "balance": "loss" if rate else "none",
        "balance_rate": float(rate or 0.0),
    }


def _refuse_windows(config: HFConfig) -> None:
    """Refuse sliding windows, unless the window is as long as the model."""
    window, longest = config.get("sliding_window"), config.get("max_position_embeddings")
    kinds = set(config.get("layer_types") or ()) - {"full_attention", "sliding_attention"}
    if kinds:
        config.add_unsupported("layer_types", "only full attention in every layer")
    in_use = config.get("use_sliding_window") is not False or "sliding_attention" in (config.get("layer_types") or ())
    if in_use and window is not None and longest is not None and window < longest:
        config.add_unsupported(
            "sliding_window",
            f"only attention over all positions, and max_position_embeddings is {longest}",
            f"sliding windows are not supported; with max_position_embeddings = {window} the two are the same",
        )


def _biases(config: HFConfig) -> dict[str, Any]:
    """Biases are on all projections or on none, apart from those that a family always has."""
    attention, mlp = bool(config.get("attention_bias")), bool(config.get("mlp_bias"))
    if config.family.model_type == "llama" and attention == mlp:
        return {"bias": attention}
    for key, wanted in (("attention_bias", attention), ("mlp_bias", mlp)):
        if wanted:
            both = config.family.model_type == "llama"
            config.add_unsupported(
                key, "biases on attention and feed-forward network together, or on neither" if both else "none here"
            )
    return {}


def _rope(config: HFConfig) -> dict[str, Any]:
    """Rotary positions, from the older spelling (`rope_theta`, `rope_scaling`) or the newer (`rope_parameters`)."""
    key = "rope_parameters" if config.values.get("rope_parameters") else "rope_scaling"
    table = dict(config.values.get(key) or {})
    theta = float(table.pop("rope_theta", config.get("rope_theta")))
    kind = table.pop("rope_type", table.pop("type", "default"))
    table.pop("type", None)
    if table.pop("partial_rotary_factor", 1.0) != 1.0:
        config.add_unsupported(key, "rotary positions on full heads only: partial_rotary_factor = 1.0")
    if kind == "default":
        return {"rope_theta": theta}
    unknown = set(table) ^ set(_LLAMA3)
    if kind != "llama3" or unknown:
        hint = f"the keys of llama3 are {', '.join(_LLAMA3)}" if kind == "llama3" else "this model cannot be imported"
        config.add_unsupported(key, 'rotary positions of type "default" and "llama3" only', hint)
        return {}
    scaling: dict[str, Any] = {field: float(table[key]) for key, field in _LLAMA3.items()}
    return {"rope_theta": theta, "rope_scaling": scaling | {"kind": kind, "original": int(scaling["original"])}}


def _validated(config: HFConfig, fields: dict[str, Any]) -> Model:
    try:
        return Model.model_validate(fields)
    except ValidationError as error:
        keys = {field: key for key, field in REQUIRED_KEYS.items()}
        problems = []
        for detail in error.errors(include_url=False):
            key = ".".join(keys.get(str(part), str(part)) for part in detail["loc"]) or "file"
            text = detail["msg"].removeprefix("Value error, ")
            message = f"is {format_value(detail['input'])}: {text}" if detail["loc"] else text
            hint = "use the published file"
            problems.append(problem_at(config.path, _line(config.text, key), key, message, hint))
        raise SpecError(problems) from None


def _line(text: str, key: str) -> int:
    """The line of a key; 1 if the file does not have it."""
    lines = text.splitlines()
    return next((number for number, line in enumerate(lines, start=1) if f'"{key}"' in line), 1)
