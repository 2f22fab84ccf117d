"""Context parallelism: every sequence is sharded over the ranks of `cp` (the exchange of DeepSpeed-Ulysses).

Outside attention a rank holds S/cp consecutive positions of all its heads. Attention needs full
sequences, so heads are exchanged for positions: one all-to-all before it, one after it.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from danlu.torch_compat import all_to_all_single_autograd


class UlyssesAttention(nn.Module):
    """An attention core that gets full sequences for some of the heads.

    Shapes: B sequences, S positions held (S·cp in all), H heads, W width of a head, C ranks of `cp`.
    """

    def __init__(self, core: nn.Module, group: ProcessGroup) -> None:
        super().__init__()
        self.core = core
        self.group = group

    def forward(
        self, q_BSHW: Tensor, k_BSKW: Tensor, v_BSKW: Tensor, documents: Any = None, sinks_H: Tensor | None = None
    ) -> Tensor:
        """Attend over the sequence of all ranks; the result has the shape that the core's has. Values may be narrower.

        `documents` describes full sequences on every rank, as the core takes it; `sinks_H` has a value per head.
        """
        ranks = self.group.size()
        own = () if sinks_H is None else (sinks_H.unflatten(0, (ranks, -1))[self.group.rank()],)
        kv_heads = k_BSKW.shape[2]
        if kv_heads % ranks:
            # Fewer key-value heads than ranks: repeat them up to one per rank.
            if ranks % kv_heads:
                raise ValueError(f"{kv_heads} key-value heads must divide the {ranks} ranks of cp or be their multiple")
            repeats = ranks // kv_heads
            k_BSKW, v_BSKW = (x.repeat_interleave(repeats, dim=2) for x in (k_BSKW, v_BSKW))
        # One exchange for all three: for each destination, its q, k and v heads side by side.
        parts = (q_BSHW, k_BSKW, v_BSKW)
        qkv = torch.cat([x.flatten(2).unflatten(2, (ranks, -1)) for x in parts], dim=3)
        full = self._exchange(qkv.movedim(2, 0)).movedim(0, 1).flatten(1, 2)
        shapes = [(x.shape[2] // ranks, x.shape[3]) for x in parts]
        pieces = full.split([count * width for count, width in shapes], dim=2)
        q, k, v = (x.unflatten(2, shape) for x, shape in zip(pieces, shapes, strict=True))
        attended = self.core(q, k, v, documents, *own)
        back = self._exchange(attended.unflatten(1, (ranks, -1)).movedim(1, 0))
        return back.movedim(0, 2).flatten(2, 3)

    def _exchange(self, x_C: Tensor) -> Tensor:
        """Send x_C[r] to rank r; what rank r sent is at [r]."""
        x_C = x_C.contiguous()
        return all_to_all_single_autograd(x_C, None, None, self.group).view_as(x_C)


def apply_cp(attentions: Iterable[nn.Module], group: ProcessGroup) -> None:
    """Wrap every attention module's `core` to get full sequences."""
    for attention in attentions:
        attention.core = UlyssesAttention(attention.get_submodule("core"), group)
