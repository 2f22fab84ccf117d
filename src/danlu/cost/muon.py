"""Muon on one rank: the matrices it orthogonalizes, what it sends for them, and the memory of both."""

from functools import lru_cache
from math import prod
from typing import NamedTuple

from danlu.cost.collectives import all_gather_time, all_to_all_time
from danlu.cost.context import CostContext
from danlu.cost.operator_time import matmul_time
from danlu.cost.parallel_layout import LayoutGroups, ParallelLayout
from danlu.cost.stage_contents import StageContents
from danlu.ops.newton_schulz import MatrixKind, MuonTraits, divide_work, matmuls, newton_schulz_flops

Shape = tuple[int, int]


class MatrixExchange(NamedTuple):
    """Matrices that are divided over the same ranks; of the first of them, which works on the largest ones."""

    ranks: tuple[int, int, int]
    """Ranks with copies of the same shards, ranks that shard rows (`shard`), and that shard matrices further (`tp`)."""
    rounds: int
    owned: tuple[Shape, ...]
    """Matrices of the busiest rank."""
    first_owned: tuple[Shape, ...]
    """Matrices of the first rank, whose traffic the others are."""
    shard: float
    """Elements that it puts into all-to-alls over the ranks of shards, there and back."""
    tensor: float
    """And over those of `tp`."""
    shared: float
    """Elements that it puts into all-gathers over the ranks with copies."""
    largest: float
    """Elements assembled at once, at most."""

    @property
    def elements_at_once(self) -> float:
        """Elements while the largest round is at work: shards that are sent, the matrix they make, and its iteration.

        Of an iteration the matrix, its product with the Gram matrix, and the next one; Gram matrices are smaller. Where
        every rank has its matrices whole, nothing is sent, and two Gram matrices are the rest.
        """
        if prod(self.ranks) > 1:
            return 5.0 * self.largest
        return 3.0 * self.largest + 2.0 * max((min(shape) ** 2 for shape in self.owned), default=0)


class MuonWork(NamedTuple):
    """Of one rank and one step."""

    dense_elements: float
    """Muon's parameters on a rank before they are sharded over data-parallel ranks; all but experts'."""
    expert_elements: float
    dense: MatrixExchange
    experts: MatrixExchange

    def flops(self, steps: int) -> float:
        """FLOPs of the first rank."""
        shapes = (*self.dense.first_owned, *self.experts.first_owned)
        return sum(newton_schulz_flops(*shape, steps) for shape in shapes)

    @property
    def sent_elements(self) -> dict[str, float]:
        """Elements that the first rank puts into collectives, by axis."""
        return {
            "shard": self.dense.shard + self.experts.shard,
            "tp": self.dense.tensor,
            "replicate": self.dense.shared + self.experts.shared,
        }

    def memory(self, element_bytes: int) -> float:
        """Bytes while the largest round is at work."""
        return element_bytes * max(self.dense.elements_at_once, self.experts.elements_at_once)


def muon_work(traits: MuonTraits, contents: StageContents, layout: ParallelLayout, groups: LayoutGroups) -> MuonWork:
    """The work of a rank of a stage."""
    return _work(
        traits,
        contents.layers - contents.moe,
        contents.moe,
        contents.mtp,
        layout.replicate,
        groups.dense.per_group,
        layout.tp,
        layout.ep,
        groups.experts.per_group,
    )


@lru_cache(maxsize=4096)
def _work(
    traits: MuonTraits,
    dense_layers: int,
    moe_layers: int,
    mtp: int,
    replicate: int,
    shard: int,
    tp: int,
    ep: int,
    apart: int,
) -> MuonWork:
    often = ((traits.dense, dense_layers), (traits.moe, moe_layers), (traits.mtp, mtp))
    counted = [(kind, layers) for kinds, layers in often for kind in kinds]
    plain = [(kind, layers) for kind, layers in counted if not kind.experts]
    routed = [(kind, layers) for kind, layers in counted if kind.experts]
    shapes = [(kind.rows, kind.columns) for kind, layers in plain for _ in range(layers)]
    stacks: list[Shape] = []
    within = 1
    for kind, layers in routed:
        held, within = _held_experts(kind, ep, apart)
        stacks += [(kind.rows, kind.columns)] * (held * layers)
    return MuonWork(
        dense_elements=sum(kind.elements * layers for kind, layers in plain) / tp,
        expert_elements=sum(kind.elements * layers for kind, layers in routed) / ep,
        dense=_exchange(tuple(shapes), (replicate, shard, tp), traits.steps),
        experts=_exchange(tuple(stacks), (replicate, within, 1), traits.steps),
    )


def _held_experts(kind: MatrixKind, ep: int, apart: int) -> tuple[int, int]:
    """Experts whose matrices a rank holds, whole or in part, and the ranks that share each of them.

    FSDP shards a stack by experts, or by their matrices where there are fewer experts than ranks.
    """
    local = kind.experts // ep
    if local < apart and (kind.rows % apart == 0 or kind.columns % apart == 0):
        return local, apart
    return -(-local // apart), 1


def _exchange(shapes: tuple[Shape, ...], ranks: tuple[int, int, int], steps: int) -> MatrixExchange:
    copies, shard, tp = ranks
    division = divide_work(shapes, copies * shard * tp, steps)
    size = [rows * columns for rows, columns in shapes]
    by_rank: dict[int, float] = {}
    for each, owner in enumerate(division.owner):
        by_rank[owner] = by_rank.get(owner, 0.0) + newton_schulz_flops(*shapes[each], steps)
    busiest = max(by_rank, key=lambda owner: by_rank[owner], default=0)
    of_replica = float(sum(size[each] for each, owner in enumerate(division.owner) if owner % copies == 0))
    of_shard = float(sum(size[each] for each, owner in enumerate(division.owner) if owner % (copies * shard) == 0))
    own = float(sum(size[each] for each, owner in enumerate(division.owner) if owner == 0))
    shared = largest = 0.0
    for members in division.rounds:
        loads, held = [0.0] * copies, dict.fromkeys((division.owner[each] for each in members), 0.0)
        for each in members:
            loads[division.owner[each] % copies] += size[each] / (shard * tp)
            held[division.owner[each]] += size[each]
        shared += max(loads)
        largest = max(largest, *held.values())
    return MatrixExchange(
        ranks,
        len(division.rounds),
        tuple(shape for shape, owner in zip(shapes, division.owner, strict=True) if owner == busiest),
        tuple(shape for shape, owner in zip(shapes, division.owner, strict=True) if owner == 0),
        shard=(of_replica / (shard * tp) + of_shard / tp) if shard > 1 else 0.0,
        tensor=(of_shard / tp + own) if tp > 1 else 0.0,
        shared=shared if copies > 1 else 0.0,
        largest=largest,
    )


def muon_time(context: CostContext, work: MuonWork, groups: LayoutGroups) -> tuple[float, float]:
    """Seconds of the busiest rank's iterations, and of what is sent before and after them; nothing overlaps."""
    traits = context.software.muon
    assert traits is not None
    compute = sum(
        traits.steps * matmul_time(context.muon_device, one.rows, one.columns, one.inner)
        for shape in (*work.dense.owned, *work.experts.owned)
        for one in matmuls(*shape)
    )
    sent = 0.0
    for exchange, is_dense in ((work.dense, True), (work.experts, False)):
        calls, each = max(1, exchange.rounds), traits.element_bytes
        span = groups.shard_group(is_dense, "group")
        if exchange.shard:
            sent += 2 * calls * all_to_all_time(context.network, span, each * exchange.shard / (2 * calls))
        if exchange.tensor:
            sent += 2 * calls * all_to_all_time(context.network, groups.tp, each * exchange.tensor / (2 * calls))
        if exchange.shared:
            gathered = each * exchange.shared * exchange.ranks[0] / calls
            sent += calls * all_gather_time(context.network, groups.replicate, gathered)
    return compute, sent
