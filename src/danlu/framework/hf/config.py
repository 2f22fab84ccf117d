"""`config.json` of a Hugging Face model to a `Model`, and back. What cannot be converted exactly is an error."""

from pathlib import Path
from typing import Any

from pydantic import ValidationError

from danlu.framework.hf.families import FAMILIES, ModelFamily
from danlu.framework.hf.families.hf_config import HFConfig, key_line
from danlu.framework.hf.families.keys import IGNORED_KEYS
from danlu.framework.hf.families.rope import LLAMA3, ROPE_KEYS, YARN
from danlu.spec.files import MAX_JSON_BYTES, parse_json, read_text
from danlu.spec.model import Model
from danlu.spec.names import MAX_LABEL_LENGTH
from danlu.spec.problem import SpecError, format_value, problem_at, suggest_name
from danlu.spec.text import one_line

CONFIG_FILE = "config.json"

_REMEDIES = {
    "quantization_config": (
        "a copy of the model in bf16: published beside the quantized one, or made with the publisher's conversion tool",
    )
}
_LARGEST = 10**18
"""Larger than any number of a configuration, and still exact enough to compute with."""


def read_config(path: Path) -> tuple[HFConfig, ModelFamily]:
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
        raise SpecError([problem_at(path, key_line(text, "model_type"), "model_type", message, hint)])
    return HFConfig(path, text, values, FAMILIES[kind].defaults), FAMILIES[kind]


def model_from_config(config: HFConfig, family: ModelFamily, name: str) -> Model:
    """The shape that a configuration describes; raises `SpecError` with everything that is not supported."""
    for key in family.required_keys:
        if config.get(key) is None:
            config.problems.append(problem_at(config.path, 1, key, "is missing", f"add `{key}`"))
    _check_kinds(config, family)
    if config.problems:
        raise SpecError(config.problems)
    for key, only in family.only_values.items():
        if config.get(key) not in (only, None):
            config.add_unsupported(
                key, f"only {format_value(only)}" if only is not None else "no support for it", *_REMEDIES.get(key, ())
            )
    fields = family.model_fields(config)
    if config.problems:
        raise SpecError(config.problems)
    name = one_line(name)[:MAX_LABEL_LENGTH] or "model"
    source = f"{family.architecture} in Hugging Face's form: {name}"
    return _validated(config, family, fields | {"name": name, "source": source})


def _check_kinds(config: HFConfig, family: ModelFamily) -> None:
    """Add a problem for every value of the wrong type, before they are used."""
    for key, kind in family.kinds.items():
        value, expected = config.get(key), ""
        if value is None:
            continue
        if kind == "number" and not _is_number(value):
            expected = "a number above 0"
        elif kind == "boolean" and not isinstance(value, bool):
            expected = "true or false"
        elif kind == "rope" and not _is_rope_table(value):
            expected = "a table of numbers and a type"
        elif kind == "ropes" and not (isinstance(value, dict) and all(map(_is_rope_table, value.values()))):
            expected = "a table of numbers and a type for every kind of layer"
        elif kind == "names" and not _is_texts(value):
            expected = "a list of names"
        if expected:
            message = f"is {format_value(value)}, but must be {expected}"
            config.problems.append(config.problem(key, message, "use the published file"))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < _LARGEST


def _is_rope_table(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and all(inner is None or isinstance(inner, str | bool) or _is_number(inner) for inner in value.values())
        and all(_is_number(value.get(key, 1)) for key in ("rope_theta", *LLAMA3))
        and all(_is_number(value.get(key) or 0) for key in YARN if key != "truncate")
        and isinstance(value.get("truncate", True), bool)
    )


def _is_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(inner, str) for inner in value)


def unknown_keys(config: HFConfig, family: ModelFamily) -> list[str]:
    """Keys that Danlu does not know and skips, each with its value."""
    known = {*family.required_keys, *family.defaults, *family.only_values, *IGNORED_KEYS, *ROPE_KEYS}
    return [f"{key} = {format_value(value)}" for key, value in config.values.items() if key not in known]


def config_from_model(model: Model, family: ModelFamily, dtype: str, carried: dict[str, Any]) -> dict[str, Any]:
    """The configuration of a model; keys of `carried`, an earlier one, that are not about the shape are kept."""
    # The kinds of layers follow from the model: a window that was as long as it at import may not be so now.
    replaced = (*ROPE_KEYS, "dtype", "torch_dtype", "layer_types", "sliding_window_pattern")
    values = {key: value for key, value in carried.items() if key not in replaced}
    values |= {"architectures": [family.architecture], "model_type": family.model_type}
    # The older spelling of dtype, because every version reads it.
    return values | family.config_values(model) | {"torch_dtype": dtype}


def _validated(config: HFConfig, family: ModelFamily, fields: dict[str, Any]) -> Model:
    try:
        return Model.model_validate(fields)
    except ValidationError as error:
        keys = {field: key for key, field in family.required_keys.items()}
        problems = []
        for detail in error.errors(include_url=False):
            key = ".".join(keys.get(str(part), str(part)) for part in detail["loc"]) or "file"
            text = detail["msg"].removeprefix("Value error, ")
            message = f"is {format_value(detail['input'])}: {text}" if detail["loc"] else text
            problems.append(config.problem(key, message, "use the published file"))
        raise SpecError(problems) from None
