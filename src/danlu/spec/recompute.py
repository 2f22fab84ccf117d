"""Which layers of a model recompute their activations, and how much of them."""

from itertools import pairwise
from typing import Annotated, Any, Literal, Self

from pydantic import Discriminator, Field, Tag, model_validator

from danlu.spec.description import SpecModel
from danlu.spec.model import MAX_LAYERS

RecomputeMode = Literal["none", "selective", "full"]
"""Activations to recompute in the backward pass: none; all but matmuls and attention; all."""
MODES_BY_LAYER: tuple[Literal["full", "selective"], ...] = ("full", "selective")
RECOMPUTE_TAGS = ("mode", "layers")
LayerRanges = Annotated[str, Field(pattern=r"^\d{1,6}(-\d{1,6})?(, ?\d{1,6}(-\d{1,6})?)*$", max_length=10_000)]
"""Layers by number, the first is 0: `0-15`, or `0-7, 16, 24-31`."""


class RecomputeLayers(SpecModel):
    """Modes by layer; layers that are not named recompute nothing."""

    full: LayerRanges | None = None
    """Layers that recompute everything; the first is 0: `"0-15"`, or `"0-7, 16"`."""
    selective: LayerRanges | None = None
    """Layers that recompute all but matmuls and attention."""

    @model_validator(mode="after")
    def _every_layer_once(self) -> Self:
        held = sorted(((part, mode) for mode in MODES_BY_LAYER for part in self.ranges(mode)), key=lambda e: e[0].start)
        if not held:
            raise ValueError('`full` must name layers, or `selective` must\nfull = "0-15", or recompute = "none"')
        for part, mode in held:
            if not part or part.stop > MAX_LAYERS:
                raise ValueError(
                    f"`{mode}` must have ranges that count upwards and end below {MAX_LAYERS:,}, but has "
                    f'{part.start}-{part.stop - 1}\n{mode} = "{max(0, part.stop - 1)}-{part.start}"'
                )
        for (part, _), (other, mode) in pairwise(held):
            if other.start < part.stop:
                raise ValueError(f"`{mode}` must not name layer {other.start} again\neach layer once")
        return self

    def ranges(self, mode: Literal["full", "selective"]) -> list[range]:
        """The layers of a mode, as the file has them."""
        text: str | None = getattr(self, mode)
        ends = [part.strip().partition("-") for part in text.split(",")] if text else []
        return [range(int(first), int(last or first) + 1) for first, _, last in ends]

    def modes(self, layers: int) -> tuple[RecomputeMode, ...]:
        """The mode of every layer."""
        named = {layer: mode for mode in MODES_BY_LAYER for part in self.ranges(mode) for layer in part}
        return tuple(named.get(layer, "none") for layer in range(layers))

    def beyond(self, layers: int) -> tuple[str, str, str] | None:
        """Key, message and remedy if a layer is named that a model of this many layers does not have."""
        last, mode = max((part[-1], mode) for mode in MODES_BY_LAYER for part in self.ranges(mode))
        if last < layers:
            return None
        left = [f"{part.start}-{min(part.stop, layers) - 1}" for part in self.ranges(mode) if part.start < layers]
        text = f"names layer {last}, but the model has layers 0 to {layers - 1}"
        return f"recompute.{mode}", text, f'{mode} = "{", ".join(left)}"' if left else f"remove `{mode}`"

    def __str__(self) -> str:
        return ", ".join(f"{mode} {held}" for mode in MODES_BY_LAYER if (held := getattr(self, mode)))


def _form(value: Any) -> str:
    return "layers" if isinstance(value, dict | RecomputeLayers) else "mode"


Recompute = Annotated[
    Annotated[RecomputeMode, Tag("mode")] | Annotated[RecomputeLayers, Tag("layers")], Discriminator(_form)
]
"""One mode for all layers, or modes by layer."""
