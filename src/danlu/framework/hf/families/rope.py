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
    if kind == "linear" and set(table) == {"factor"}:
        return {"rope_theta": theta, "rope_scaling": {"kind": kind, "factor": float(table["factor"])}}
    unknown = set(table) ^ set(LLAMA3)
    if kind != "llama3" or unknown:
        hint = f"the keys of llama3 are {', '.join(LLAMA3)}" if kind == "llama3" else "this model cannot be imported"
        config.add_unsupported(key, 'rotary positions of type "default", "linear" and "llama3" only', hint)
        return {}
    scaling: dict[str, Any] = {field: float(table[key]) for key, field in LLAMA3.items()}
    return {"rope_theta": theta, "rope_scaling": scaling | {"kind": kind, "original": int(scaling["original"])}}


def rope_values(model: Model) -> dict[str, Any]:
    """The keys of a `config.json` about rotary positions, in the older spelling, because every version reads it."""
    values: dict[str, Any] = {"rope_theta": model.rope_theta, "rope_scaling": None}
    if (scaling := model.rope_scaling) is not None:
        values["rope_scaling"] = {"rope_type": scaling.kind}
        keys = {"factor": "factor"} if scaling.kind == "linear" else LLAMA3
        values["rope_scaling"] |= {key: getattr(scaling, field) for key, field in keys.items()}
    return values
