"""FLOPs and bytes sent by one rank in one step, counted from shapes: what a dry run of the same layout can be held to.

Bytes are those that a rank puts into its collectives and sends, whatever the network makes of them, by axis. FLOPs are
those of matrix products and of the causal half of attention, as the operators count them.
"""

from dataclasses import dataclass

from danlu.cost.cutting import Cutting
from danlu.cost.layer import attention_products, expert_products, network_products
from danlu.cost.schedule import gathers as gathers_of
from danlu.cost.stages import Holding


@dataclass(frozen=True)
class Counts:
    """Of one rank and one step."""

    flops: float
    sent: dict[str, float]
    """Bytes by axis; axes along which nothing is sent are missing."""


class Counting(Cutting):
    """The working of one layout's counts."""

    def of_rank(self, rank: int) -> Counts:
        """Of the rank at one place on the pipeline."""
        holding = self.holdings[rank]
        sent = {
            "tp": self._tensor(holding),
            "cp": self._context(holding),
            "ep": self._expert(holding),
            "shard": self._shard(holding),
            "replicate": self._replicate(holding),
            "pp": self._pipeline(rank),
        }
        return Counts(self._flops(holding), {axis: size for axis, size in sent.items() if size})

    @property
    def _tokens(self) -> int:
        return self.cut.sequences * self.cut.length // self.cut.cp

    def _flops(self, holding: Holding) -> float:
        """Products once forward and twice backward, and once more where everything is computed again.

        What is computed again stops before a block's last product, whose result nobody needs.
        """
        shape, cut, tokens = self.shape, self.cut, self._tokens
        full = self.software.recompute == "full"
        core = 2.0 * cut.sequences * cut.length**2 / cut.cp * (shape.heads // cut.tp) * (shape.head + shape.value) / 2
        total = 0.0
        for count, moe in ((holding.dense, False), (holding.moe, True)):
            if not count:
                continue
            products = [*attention_products(shape, tokens, cut.tp), *network_products(shape, tokens, cut.tp, moe)]
            linear = sum(2.0 * m * n * k for m, n, k in products)
            if moe:
                routed = expert_products(shape, tokens, cut, self.software)
                linear += sum(2.0 * groups * m * n * k for groups, m, n, k in routed)
            last = 0.0 if moe else 2.0 * tokens * shape.width * shape.mlp / cut.tp
            total += count * (3 * linear + 3.5 * core + ((linear - last + core) if full else 0.0))
        if holding.head:
            total += 3 * 2.0 * tokens * shape.width * shape.vocabulary / cut.tp
        return self.layout.microbatches * total

    def _tensor(self, holding: Holding) -> float:
        """A gather and a scatter around attention and around the network, both passes; embedding and head."""
        tp = self.cut.tp
        if tp == 1:
            return 0.0
        stream = float(self.software.activation_bytes * self._tokens * self.shape.width)
        both = stream / tp + stream
        again = {"full": both, "elementwise": stream / tp}.get(self.software.recompute or "none", 0.0)
        total = 0.0
        for count, moe in ((holding.dense, False), (holding.moe, True)):
            blocks = 1 + (not moe or self.shape.shared_width > 0)
            # What is computed again ends before the last sum over ranks.
            spared = stream if self.software.recompute == "full" and not moe else 0.0
            total += count * (blocks * (2 * both + again) - spared)
        total += (holding.embedding + holding.head) * both
        return self.layout.microbatches * total

    def _context(self, holding: Holding) -> float:
        """Heads against positions and back."""
        cut, shape = self.cut, self.shape
        if cut.cp == 1:
            return 0.0
        heads, groups = shape.heads // cut.tp, max(shape.kv_heads // cut.tp, cut.cp)
        elements = self._tokens * (heads + groups) * (shape.head + shape.value)
        once = float(self.software.activation_bytes * elements)
        return self.layout.microbatches * holding.layers * once * self._passes

    def _expert(self, holding: Holding) -> float:
        """Tokens to their experts and back."""
        cut, shape = self.cut, self.shape
        if cut.ep == 1:
            return 0.0
        copies = shape.top_k * self._tokens / cut.tp * self.software.imbalance
        rows = self.software.activation_bytes * copies * shape.width
        return self.layout.microbatches * holding.moe * 2 * rows * self._passes

    @property
    def _passes(self) -> int:
        """Passes that exchange: forward, backward, and again where nothing is kept."""
        return 3 if self.software.recompute == "full" else 2

    def _shard(self, holding: Holding) -> float:
        """Shards to be gathered, and whole gradients to be scattered."""
        mine, layout = self.held(holding), self.layout
        gathers: float = layout.microbatches * (2 if layout.reshards else 1)
        if self.deferred and not layout.reshards:
            gathers = gathers_of(layout.schedule, layout.pp, layout.microbatches, layout.stages_per_rank)
        scatters = layout.microbatches if self.every else 1
        total = 0.0
        for count, dense in ((mine.dense, True), (mine.experts, False)):
            ranks = self.places.replicas(dense).group
            if ranks == 1:
                continue
            total += count * (gathers * self.software.parameter_bytes / ranks + scatters * self.software.gradient_bytes)
            if dense and holding.head and layout.reshards:
                # The backward pass begins with the head, so it is not freed before.
                table = self.shape.vocabulary * self.shape.width / layout.tp
                total -= table * layout.microbatches * self.software.parameter_bytes / ranks
        return total

    def _replicate(self, holding: Holding) -> float:
        """Gradients of one group's shards, summed once a step."""
        if self.layout.replicate == 1:
            return 0.0
        mine = self.held(holding)
        each = self.software.gradient_bytes
        return each * (mine.dense / self.places.dense.group + mine.experts / self.places.experts.group)

    def _pipeline(self, rank: int) -> float:
        """The stream to the next stage and its gradient to the one before."""
        layout = self.layout
        if layout.pp == 1:
            return 0.0
        stream = self.software.activation_bytes * self._tokens * self.shape.width / layout.tp
        stages = layout.pp * layout.stages_per_rank
        mine = [rank + turn * layout.pp for turn in range(layout.stages_per_rank)]
        if layout.schedule == "zbv":
            mine = [rank, stages - 1 - rank]
        ends = sum(stage in mine for stage in (0, stages - 1))
        local = 2 if layout.schedule == "zbv" and rank == layout.pp - 1 else 0
        return layout.microbatches * stream * (2 * len(mine) - ends - local)
