"""Says when routers keep sending most tokens to the same few experts: the others learn nothing, and ranks wait."""

from danlu.spec.model import Model
from danlu.spec.recipe import Recipe

PATIENCE = 100
"""Steps in a row after which it is said: a young router is uneven for a while."""
_SHARE_OF_WORST = 0.5
_LEAST = 2.0


class CollapseAlarm:
    """Watches the load of the busiest expert over the mean; speaks once, and again if it had recovered meanwhile."""

    def __init__(self, recipe: Recipe) -> None:
        self._moe = recipe.model.moe if isinstance(recipe.model, Model) else None
        self._steps = 0
        """In a row, up to now."""

    def check(self, imbalance: float | None) -> str:
        """What to warn of after a step; empty if nothing is new."""
        if self._moe is None or imbalance is None:
            return ""
        worst = self._moe.experts / self._moe.top_k  # all tokens choose the same experts
        is_uneven = imbalance >= max(_LEAST, _SHARE_OF_WORST * worst)
        self._steps = self._steps + 1 if is_uneven else 0
        if self._steps != PATIENCE:
            return ""
        remedy = {
            "loss": f"raise `model.moe.balance_rate` ({self._moe.balance_rate:g}), or set `model.moe.balance` to bias",
            "bias": f"raise `model.moe.balance_rate` ({self._moe.balance_rate:g}), or set `model.moe.balance` to exact",
        }.get(self._moe.balance, "set `model.moe.balance` to bias or exact")
        return (
            f"the routers collapse: for {PATIENCE} steps the busiest expert of a layer has had {imbalance:.1f} × the "
            f"mean load, of {worst:.1f} × at most; the others learn little, and ranks of `ep` wait for one; {remedy}"
        )
