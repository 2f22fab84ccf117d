"""What things cost, by pure arithmetic over descriptions. No torch."""

from danlu.cost.model import (
    LayerParameters,
    active_parameters,
    flops_per_token,
    layer_parameters,
    lookup_parameters,
    parameters,
)

__all__ = [
    "LayerParameters",
    "active_parameters",
    "flops_per_token",
    "layer_parameters",
    "lookup_parameters",
    "parameters",
]
