"""Goodput under failures: which storage tier to save to, how often, and the share of time spent on useful training.

A run fails whenever any of its nodes does; a failure costs the restart, the reading of a checkpoint, and on average
half a period between two saves. Goodput, (1 - save/p) · F / (F + restart + p/2) for a period p and a mean time between
failures F, is largest for p = save + √(2 (F + restart) save + save²); for short saves and restarts that is
Young's √(2 · save · F) (Young, "A first order approximation to the optimum checkpoint interval", 1974; Daly,
2006).
"""

from dataclasses import dataclass
from math import sqrt

from danlu.cost import count_parameters
from danlu.cost.memory import EMA_BYTES
from danlu.ops.newton_schulz import muon_traits
from danlu.planner.request import PlanRequest
from danlu.spec.cluster import StorageTier
from danlu.spec.rank_placement import nodes_used

BYTES_PER_PARAMETER, MOMENT_BYTES = 12, 4
"""Of a checkpoint: a parameter and two moments, all in fp32; Muon has one moment."""


@dataclass(frozen=True, kw_only=True)
class Goodput:
    """Expected goodput of a run on its cluster."""

    tier: str
    save: float
    """Seconds of one save, during which training stalls."""
    recover: float
    """Seconds from a failure to the first new step."""
    between_failures: float
    """Seconds, for all nodes together."""
    period: float
    """Seconds from one save to the next."""
    share: float
    """Share of time spent on useful training."""
    young: float
    """Seconds between saves by Young's formula, for comparison."""

    def steps_between_saves(self, step: float) -> int:
        """Steps between saves."""
        return max(1, round((self.period - self.save) / step))


def goodput(request: PlanRequest, mtbf: float | None = None) -> Goodput | None:
    """Goodput with the cluster's best tier for checkpoints; None if it has no [[tiers]] or no [failures].

    `mtbf` overrides the cluster's mean time between failures of a node.
    """
    failures = request.cluster.failures
    node = mtbf if mtbf is not None else failures.node_mtbf if failures else None
    if node is None or not request.cluster.tiers:
        return None
    restart = failures.restart if failures else 60.0
    found = [_with_tier(request, tier, node, restart) for tier in request.cluster.tiers]
    fitting = [one for one in found if one is not None]
    return max(fitting, key=lambda one: one.share, default=None)


def optimal_save_interval(save: float, between_failures: float, recover: float) -> float:
    """Seconds from one save to the next that maximize goodput."""
    return save + sqrt(2 * (between_failures + recover) * save + save**2)


def goodput_share(every: float, save: float, between_failures: float, recover: float) -> float:
    """Goodput with a save every `every` seconds."""
    return (1 - save / every) * between_failures / (between_failures + recover + every / 2)


def checkpoint_bytes(request: PlanRequest) -> int:
    """Bytes of a checkpoint: the parameters, what the optimizer keeps of them, and their average if there is one."""
    model, recipe = request.model, request.recipe
    saved = (BYTES_PER_PARAMETER + (EMA_BYTES if recipe.ema else 0)) * count_parameters(model)
    if muon := muon_traits(model, recipe.optimizer):
        layers = [model.is_moe_layer(layer) for layer in range(model.layers)]
        layers += layers[-1:] * model.mtp_depth
        matrices = [kind for moe in layers for kind in (muon.moe if moe else muon.dense)]
        saved -= MOMENT_BYTES * sum(kind.elements for kind in [*matrices, *muon.mtp * model.mtp_depth])
    return saved


def _with_tier(request: PlanRequest, tier: StorageTier, node_mtbf: float, restart: float) -> Goodput | None:
    """Goodput with saves to one tier; None if it is too small."""
    nodes = nodes_used(request.chips, request.cluster)
    checkpoint = checkpoint_bytes(request)
    if tier.kind in ("memory", "local"):
        # A lost node takes its shard with it: every shard is also sent to another node.
        each = 2 * checkpoint / nodes
        outer = request.cluster.levels[min(1, len(request.cluster.levels) - 1)]
        sent = each / 2 / (request.cluster.chips_per_node * outer.bandwidth / outer.oversubscription)
        save, load = max(each / tier.write, sent), checkpoint / nodes / tier.read
    else:
        each = float(checkpoint)
        save, load = checkpoint / tier.write, checkpoint / tier.read
    if 2 * each > tier.capacity:  # the newest is written before the previous one is removed
        return None
    between, recover = node_mtbf / nodes, restart + load
    best = optimal_save_interval(save, between, recover)
    return Goodput(
        tier=tier.name,
        save=save,
        recover=recover,
        between_failures=between,
        period=best,
        share=goodput_share(best, save, between, recover),
        young=sqrt(2 * save * between),
    )
