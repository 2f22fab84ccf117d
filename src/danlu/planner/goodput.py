"""What failures leave of the speed: where to keep checkpoints, how often to save, and the share of time that counts.

A run fails as often as any of its nodes; a failure costs the restart, the reading of a checkpoint, and on average half
a period between two saves. The share of time that counts, (1 - save/p) · F / (F + restart + p/2) for a period p and a
mean time between failures F, is largest for p = save + √(2 (F + restart) save + save²); for short saves and restarts
that is Young's √(2 · save · F) (Young, "A first order approximation to the optimum checkpoint interval", 1974; Daly,
2006).
"""

from dataclasses import dataclass
from math import sqrt

from danlu.cost import parameters
from danlu.planner.question import Question
from danlu.spec.cluster import Tier
from danlu.spec.placing import nodes_used

BYTES_PER_PARAMETER = 14
"""Of a checkpoint: parameters in half precision, their fp32 copy and two moments in fp32 (Rajbhandari et al., "ZeRO",
2020, section 3.1, without gradients)."""


@dataclass(frozen=True, kw_only=True)
class Goodput:
    """How a run fares with the failures of its machine."""

    tier: str
    save: float
    """Seconds of one save, while which nothing is trained."""
    recover: float
    """Seconds from a failure to the first new step."""
    between_failures: float
    """Seconds, of the whole run."""
    period: float
    """Seconds from one save to the next."""
    share: float
    """Of the time that counts."""
    young: float
    """Seconds between saves by Young's formula, to compare with."""

    def every(self, step: float) -> int:
        """Steps between saves."""
        return max(1, round((self.period - self.save) / step))


def goodput(question: Question, mtbf: float | None = None) -> Goodput | None:
    """The best of the machine's tiers for checkpoints; None where the cluster names no tier or no failures.

    `mtbf` takes the place of the cluster's mean time between failures of a node.
    """
    failures = question.cluster.failures
    node = mtbf if mtbf is not None else failures.node_mtbf if failures else None
    if node is None or not question.cluster.tiers:
        return None
    restart = failures.restart if failures else 60.0
    found = [_with_tier(question, tier, node, restart) for tier in question.cluster.tiers]
    fitting = [one for one in found if one is not None]
    return max(fitting, key=lambda one: one.share, default=None)


def period(save: float, between_failures: float, recover: float) -> float:
    """Seconds from one save to the next that leave most time for training."""
    return save + sqrt(2 * (between_failures + recover) * save + save**2)


def share(every: float, save: float, between_failures: float, recover: float) -> float:
    """Of the time that counts, with a save every so many seconds."""
    return (1 - save / every) * between_failures / (between_failures + recover + every / 2)


def checkpoint_bytes(question: Question) -> int:
    """Bytes of a whole checkpoint."""
    return BYTES_PER_PARAMETER * parameters(question.model)


def _with_tier(question: Question, tier: Tier, node_mtbf: float, restart: float) -> Goodput | None:
    """A run that saves to one tier; None if it is too small."""
    nodes, whole = nodes_used(question.chips, question.cluster), checkpoint_bytes(question)
    if tier.kind in ("memory", "local"):
        # A node that is lost takes its part with it: every part is kept on another node too, and sent there.
        each = 2 * whole / nodes
        outer = question.cluster.levels[min(1, len(question.cluster.levels) - 1)]
        sent = each / 2 / (question.cluster.chips_per_node * outer.bandwidth / outer.oversubscription)
        save, load = max(each / tier.write, sent), whole / nodes / tier.read
    else:
        each = float(whole)
        save, load = whole / tier.write, whole / tier.read
    if 2 * each > tier.capacity:  # the newest is written before the one before it is removed
        return None
    between, recover = node_mtbf / nodes, restart + load
    best = period(save, between, recover)
    return Goodput(
        tier=tier.name,
        save=save,
        recover=recover,
        between_failures=between,
        period=best,
        share=share(best, save, between, recover),
        young=sqrt(2 * save * between),
    )
