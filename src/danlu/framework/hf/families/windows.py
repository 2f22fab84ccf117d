"""Layers with a sliding window in a `config.json`: `sliding_window`, and which layers have it."""

from collections.abc import Sequence
from typing import Any

from danlu.framework.hf.families.hf_config import HFConfig
from danlu.spec.model import MAX_LAYERS, Model

FULL, SLIDING = "full_attention", "sliding_attention"


def is_layer_count(layers: Any) -> bool:
    """Whether a list of as many layers can be made; what cannot be is refused with the model."""
    return isinstance(layers, int) and 0 < layers <= MAX_LAYERS


def window_fields(config: HFConfig, kinds: Sequence[str], *, keep_long: bool = False) -> dict[str, Any]:
    """The fields of a `Model` about windows, from the kind of every layer.

    A window as long as the model is none, unless `keep_long`: where such layers have positions of their own.
    """
    window, longest = config.get("sliding_window"), config.get("max_position_embeddings")
    if set(kinds) - {FULL, SLIDING}:
        config.add_unsupported("layer_types", f"only layers of type {FULL} and {SLIDING}")
        return {}
    if SLIDING not in kinds or window is None or (window >= longest and not keep_long):
        return {}
    for every in (None, *range(2, len(kinds) + 1)):
        for first in {0, kinds.index(SLIDING)}:
            if [*kinds] == [_kind(layer, first, every) for layer in range(len(kinds))]:
                return {"window": window, "global_first": first, "global_every": every}
    config.add_unsupported("layer_types", f"{FULL} in the first layers, and in the last of every so many others")
    return {}


def _kind(layer: int, first: int, every: int | None) -> str:
    return FULL if layer < first or (every is not None and layer % every == every - 1) else SLIDING


def layer_kinds(model: Model) -> list[str]:
    """The value of `layer_types` for a model."""
    return [FULL if model.layer_window(layer) is None else SLIDING for layer in range(model.layers)]


def listed_kinds(config: HFConfig) -> list[str] | None:
    """The value of `layer_types`, if there is one that fits the number of layers."""
    kinds, layers = config.get("layer_types"), config.get("num_hidden_layers")
    if kinds is not None and len(kinds) != layers:
        config.problems.append(
            config.problem(
                "layer_types", f"has {len(kinds)} layers, but num_hidden_layers is {layers}", "one per layer"
            )
        )
        return [FULL] * len(kinds)
    return None if kinds is None else list(kinds)
