"""The share of one layer that one rank computes for one microbatch: what all families of operators are counted from."""

from typing import NamedTuple

from danlu.ops.model_shape import ModelShape


class Matmul(NamedTuple):
    """`groups` products of rows × inner by inner × columns."""

    rows: int
    columns: int
    inner: int
    groups: int = 1

    @property
    def flops(self) -> float:
        """A multiply-add is two."""
        return 2.0 * self.groups * self.rows * self.columns * self.inner


class LayerShard(NamedTuple):
    """Sizes of one layer and one microbatch on one rank."""

    model: ModelShape
    sequences: int
    """Of a microbatch."""
    length: int
    tp: int = 1
    cp: int = 1
    ep: int = 1
    sequence_parallel: bool = True
    """Whether `tp` also shards positions between the matmuls."""
    expert_tp: int = 1
    """Tensor parallelism inside an expert."""
    expert_imbalance: float = 1.0
    """Tokens of the fullest expert rank over the mean."""
    pad_values: bool = False
    """Whether values and queries of different widths are padded to the same, for attention kernels that have one."""
    ring: bool = False
    """Whether `cp` passes keys and values around a ring, not heads to all in exchange for positions."""

    @property
    def tokens(self) -> int:
        """Before `tp` shards positions."""
        return self.sequences * self.length // self.cp

    @property
    def stream(self) -> float:
        """Elements of the residual stream between blocks."""
        return self.tokens * self.model.width / (self.tp if self.sequence_parallel else 1)

    @property
    def core_widths(self) -> tuple[int, int]:
        """Widths of a head's key and of its value as attention's kernels get them."""
        widths = self.model.head_dim, self.model.v_head_dim
        return (max(widths),) * 2 if self.pad_values else widths

    @property
    def routed_rows(self) -> float:
        """Rows that the experts of the fullest rank get: every token once per chosen expert."""
        return self.tokens * self.model.top_k / self.tp * self.expert_imbalance

    @property
    def local_experts(self) -> int:
        """Routed experts of a rank."""
        return max(1, self.model.experts // self.ep)
