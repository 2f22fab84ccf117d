"""Rotary positions in a `config.json`: `rope_theta` and `rope_scaling`, or the newer `rope_parameters`."""

from typing import Any

from danlu.framework.hf.families.hf_config import HFConfig
from danlu.spec.model import Model

ROPE_KEYS = ("rope_theta", "rope_scaling", "rope_parameters")
LLAMA3 = {
    "factor": "factor",
    "low_freq_factor": "low",
    "high_freq_factor": "high",
    "original_max_position_embeddings": "original",
}
"""Keys of scaled positions of type "llama3", and the fields they become."""
YARN = {
    "factor": "factor",
    "beta_slow": "low",
    "beta_fast": "high",
    "original_max_position_embeddings": "original",
    "attention_factor": "attention_factor",
    "mscale": "mscale",
    "mscale_all_dim": "mscale_all_dim",
    "truncate": "truncate",
}
"""The same of type "yarn"; all but the first and the original length may be missing."""


def rope_fields(config: HFConfig, given: dict[str, Any] | None = None) -> dict[str, Any]:
    """The fields of a `Model` about rotary positions: from the table `given`, or from the one of all layers."""
    key = "rope_parameters" if config.values.get("rope_parameters") else "rope_scaling"
    table = dict(config.values.get(key) or {}) if given is None else given
    theta = float(table.pop("rope_theta", config.get("rope_theta")))
    kind = table.pop("rope_type", table.pop("type", "default"))
    table.pop("type", None)
    if table.pop("partial_rotary_factor", 1.0) != 1.0:
        config.add_unsupported(key, "rotary positions on full heads only: partial_rotary_factor = 1.0")
    if kind == "default":
        return {"rope_theta": theta}
    if kind == "yarn":
        return {"rope_theta": theta, "rope_scaling": _yarn_fields(config, key, table)}
    if kind == "linear" and set(table) == {"factor"}:
        return {"rope_theta": theta, "rope_scaling": {"kind": kind, "factor": float(table["factor"])}}
    unknown = set(table) ^ set(LLAMA3)
    if kind != "llama3" or unknown:
        hint = f"the keys of llama3 are {', '.join(LLAMA3)}" if kind == "llama3" else "this model cannot be imported"
        config.add_unsupported(key, 'rotary positions of type "default", "linear", "llama3" and "yarn" only', hint)
        return {}
    scaling: dict[str, Any] = {field: float(table[key]) for key, field in LLAMA3.items()}
    return {"rope_theta": theta, "rope_scaling": scaling | {"kind": kind, "original": int(scaling["original"])}}


def _yarn_fields(config: HFConfig, key: str, table: dict[str, Any]) -> dict[str, Any]:
    given = {name: value for name, value in table.items() if value is not None}
    if unknown := [name for name in given if name not in YARN]:
        hint = f"the keys of yarn are {', '.join(YARN)}"
        config.add_unsupported(key, f"positions of type yarn without {', '.join(unknown)}", hint)
    if missing := [name for name in ("factor", "original_max_position_embeddings") if name not in given]:
        config.add_unsupported(key, f"positions of type yarn with {' and '.join(missing)}", f"add {missing[0]}")
    fields = {field: given[name] for name, field in YARN.items() if name in given}
    return {
        field: value if field == "truncate" else int(value) if field == "original" else float(value)
        for field, value in fields.items()
    } | {"kind": "yarn"}


def rope_values(model: Model) -> dict[str, Any]:
    """The keys of a `config.json` about rotary positions, in the older spelling, because every version reads it."""
    values: dict[str, Any] = {"rope_theta": model.rope_theta, "rope_scaling": None}
    if (scaling := model.rope_scaling) is not None:
        values["rope_scaling"] = {"rope_type": scaling.kind}
        keys = {"linear": {"factor": "factor"}, "llama3": LLAMA3, "yarn": YARN}[scaling.kind]
        found = {key: getattr(scaling, field) for key, field in keys.items()}
        values["rope_scaling"] |= {key: value for key, value in found.items() if value is not None}
        if scaling.truncate:
            values["rope_scaling"].pop("truncate", None)
    return values
