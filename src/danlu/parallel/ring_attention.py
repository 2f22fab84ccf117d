"""Context parallelism by a ring: keys and values travel from rank to rank while each attends over those it has.

A rank holds two chunks of every sequence (`SequenceShard`), in their order. Over its own keys attention is causal. Keys
of a rank before it on the ring's numbering contribute their first chunk, to all its queries; keys of a rank after it
contribute both chunks, to its second half of queries. So no block but the first needs a causal mask, none is computed
in vain, and every rank computes the same number of pairs in every turn.

Forward and backward are one operator each: `torch.compile` and selective recompute see them whole, and the latter keeps
the result instead of sending again. What they do is in plain functions (`DECOMPOSITIONS`), which a dry run records.

Shapes: B sequences, S positions held (S·ranks in all), H heads, K key-value heads, W width of a head.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from danlu.ops.operators.attention_block import BlockMask, attend, attend_backward, hidden_score, merge
from danlu.parallel.sequence_shard import SequenceShard
from danlu.torch_compat import resolve_process_group


class RotaryCore(Protocol):
    """An attention core whose positions a ring can choose: plain causal attention after them."""

    def rotate(self, q_BSHW: Tensor, k_BSKW: Tensor, positions_BS: Tensor) -> tuple[Tensor, Tensor]:
        """Queries and keys at these positions of their sequences or documents."""
        ...


class RingAttention(nn.Module):
    """Attention over the sequences of all ranks of a group, each of which holds its `SequenceShard`."""

    def __init__(self, core: Any, group: ProcessGroup) -> None:
        """`core` is a `RotaryCore`, kept for its rotation alone."""
        super().__init__()
        self.core = core
        self.group_name = group.group_name
        self.shard = _shard_of(group)

    def forward(self, q_BSHW: Tensor, k_BSKW: Tensor, v_BSKW: Tensor, documents: Any = None) -> Tensor:
        """Attend; the result has the shape of `q_BSHW`, with the width of the values.

        `documents` has `positions_BS`, of every token of the full sequences in its document.
        """
        place_1S = self.shard.positions(q_BSHW.shape[1], q_BSHW.device)[None]
        if documents is None:
            q_BSHW, k_BSKW = self.core.rotate(q_BSHW, k_BSKW, place_1S)
            first_BS = None
        else:
            positions_BS = self.shard.take(documents.positions_BS)
            q_BSHW, k_BSKW = self.core.rotate(q_BSHW, k_BSKW, positions_BS)
            first_BS = place_1S - positions_BS
        attended, _ = ring_attention(q_BSHW, k_BSKW, v_BSKW, first_BS, self.group_name)
        return attended


def apply_ring(attentions: Iterable[nn.Module], group: ProcessGroup) -> None:
    """Replace every attention module's `core`, a `RotaryCore`, by one over the ring."""
    for attention in attentions:
        attention.core = RingAttention(attention.get_submodule("core"), group)


class RingBlock(NamedTuple):
    """The queries that see something of the keys a rank has in a turn, and the keys that they see."""

    queries: slice
    keys: slice
    mask: BlockMask


def ring_blocks(shard: SequenceShard, held: int, first_BS: Tensor | None, dtype: torch.dtype) -> Iterator[RingBlock]:
    """What a rank computes in every turn: first with its own keys, then with those of the ranks before it.

    It holds `held` positions. `first_BS` is where the document of each of its queries begins in the full sequence.
    """
    everything, half = slice(0, held), held // 2
    for turn in range(shard.ranks):
        source = shard._replace(rank=(shard.rank - turn) % shard.ranks)
        queries = slice(half, held) if source.rank > shard.rank else everything
        keys = slice(0, half) if source.rank < shard.rank else everything
        mask = BlockMask(causal=turn == 0)
        if first_BS is not None:
            key_T = source.positions(held, first_BS.device)[keys]
            hidden_BST = key_T < first_BS[:, queries, None]
            if turn == 0:
                hidden_BST = hidden_BST | (key_T > key_T[:, None])
            added_BST = torch.zeros(hidden_BST.shape, dtype=dtype, device=first_BS.device)
            mask = BlockMask(added_B1ST=added_BST.masked_fill_(hidden_BST, hidden_score(dtype))[:, None])
        yield RingBlock(queries, keys, mask)


def _pass_on(group: ProcessGroup, tensors: Sequence[Tensor]) -> Callable[[], list[Tensor]]:
    """Begin to send tensors to the next rank; what is returned waits for those of the rank before.

    Tensors must stay as they are until then.
    """
    following, before = (group.rank() + 1) % group.size(), (group.rank() - 1) % group.size()
    arriving = [torch.empty_like(tensor) for tensor in tensors]
    transfers = [dist.P2POp(dist.isend, tensor, group=group, group_peer=following) for tensor in tensors]
    transfers += [dist.P2POp(dist.irecv, tensor, group=group, group_peer=before) for tensor in arriving]
    works = dist.batch_isend_irecv(transfers)

    def wait() -> list[Tensor]:
        for work in works:
            work.wait()
        return arriving

    return wait


def _shard_of(group: ProcessGroup) -> SequenceShard:
    return SequenceShard(group.rank(), group.size(), zigzag=True)


def _attend_around(
    q_BSHW: Tensor, k_BSKW: Tensor, v_BSKW: Tensor, first_BS: Tensor | None, group_name: str
) -> tuple[Tensor, Tensor]:
    """The result in the layout of the queries, and its log-sum-exp by head and query."""
    group = resolve_process_group(group_name)
    blocks = ring_blocks(_shard_of(group), q_BSHW.shape[1], first_BS, q_BSHW.dtype)
    q_BHSW = q_BSHW.transpose(1, 2)
    traveling = [k_BSKW.contiguous(), v_BSKW.contiguous()]
    out_BHSW = torch.zeros(*q_BHSW.shape[:3], v_BSKW.shape[-1], dtype=torch.float32, device=q_BSHW.device)
    logsumexp_BHS = torch.full_like(out_BHSW[..., 0], -math.inf)
    for turn, (queries, keys, mask) in enumerate(blocks, start=1):
        arriving = _pass_on(group, traveling) if turn < group.size() else None
        k_BKTW, v_BKTW = (x[:, keys].transpose(1, 2) for x in traveling)
        more_BHSW, more_BHS = attend(q_BHSW[:, :, queries], k_BKTW, v_BKTW, mask)
        merge(out_BHSW[:, :, queries], logsumexp_BHS[:, :, queries], more_BHSW, more_BHS)
        if arriving is not None:
            traveling = arriving()
    return out_BHSW.transpose(1, 2).type_as(q_BSHW).contiguous(), logsumexp_BHS


def _attend_around_backward(
    grad_BSHW: Tensor,
    q_BSHW: Tensor,
    k_BSKW: Tensor,
    v_BSKW: Tensor,
    out_BSHW: Tensor,
    logsumexp_BHS: Tensor,
    first_BS: Tensor | None,
    group_name: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """A second time around: keys and values travel again, and their gradients a turn behind, home at the end.

    Gradients of keys and values are summed in fp32. Those from a rank's own queries stay with it, so that one turn less
    is sent.
    """
    group = resolve_process_group(group_name)
    blocks = ring_blocks(_shard_of(group), q_BSHW.shape[1], first_BS, q_BSHW.dtype)
    grad_BHSW, q_BHSW, out_BHSW = (x.transpose(1, 2) for x in (grad_BSHW, q_BSHW, out_BSHW))
    traveling = [k_BSKW.contiguous(), v_BSKW.contiguous()]
    d_q_BHSW = torch.zeros_like(q_BHSW, dtype=torch.float32)
    d_own = [torch.zeros_like(x, dtype=torch.float32) for x in traveling]
    returning: Callable[[], list[Tensor]] | None = None
    for turn, (queries, keys, mask) in enumerate(blocks, start=1):
        arriving = _pass_on(group, traveling) if turn < group.size() else None
        k_BKTW, v_BKTW = (x[:, keys].transpose(1, 2) for x in traveling)
        grad, q, out, logsumexp = (x[:, :, queries] for x in (grad_BHSW, q_BHSW, out_BHSW, logsumexp_BHS))
        d_q, *d_kv = attend_backward(grad, q, k_BKTW, v_BKTW, out, logsumexp, mask)
        d_q_BHSW[:, :, queries] += d_q
        if turn == 1:
            gradients = d_own
        elif returning is None:
            gradients = [torch.zeros_like(x) for x in d_own]
        else:
            gradients = returning()
        for sum_BSKW, more_BKTW in zip(gradients, d_kv, strict=True):
            sum_BSKW[:, keys] += more_BKTW.transpose(1, 2)
        if turn > 1:
            returning = _pass_on(group, gradients)
        if arriving is not None:
            traveling = arriving()
    if returning is not None:
        for sum_BSKW, more_BSKW in zip(d_own, returning(), strict=True):
            sum_BSKW += more_BSKW
    d_k_BSKW, d_v_BSKW = (x.type_as(k_BSKW) for x in d_own)
    return d_q_BHSW.transpose(1, 2).type_as(q_BSHW).contiguous(), d_k_BSKW, d_v_BSKW


ring_attention: Any = torch.library.custom_op(
    "danlu::ring_attention",
    _attend_around,
    mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor v, Tensor? first, str group) -> (Tensor, Tensor)",
)
_ring_attention_backward: Any = torch.library.custom_op(
    "danlu::ring_attention_backward",
    _attend_around_backward,
    mutates_args=(),
    schema="(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor logsumexp, Tensor? first, str group)"
    " -> (Tensor, Tensor, Tensor)",
)


def _attended_shapes(
    q_BSHW: Tensor, k_BSKW: Tensor, v_BSKW: Tensor, first_BS: Tensor | None, group_name: str
) -> tuple[Tensor, Tensor]:
    sequences, held, heads, _ = q_BSHW.shape
    logsumexp_BHS = q_BSHW.new_empty(sequences, heads, held, dtype=torch.float32)
    return q_BSHW.new_empty(sequences, held, heads, v_BSKW.shape[-1]), logsumexp_BHS


def _gradient_shapes(
    grad: Tensor, q_BSHW: Tensor, k_BSKW: Tensor, v_BSKW: Tensor, *rest: object
) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q_BSHW, k_BSKW, v_BSKW))
    return q, k, v


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, group_name = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.group_name = group_name
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, grad_BSHW: Tensor, _grad_logsumexp: None) -> tuple[Any, ...]:
    q, k, v, first_BS, out, logsumexp = ctx.saved_tensors
    gradients = _ring_attention_backward(grad_BSHW, q, k, v, out, logsumexp, first_BS, ctx.group_name)
    return *gradients, None, None


ring_attention.register_fake(_attended_shapes)
_ring_attention_backward.register_fake(_gradient_shapes)
ring_attention.register_autograd(_differentiate, setup_context=_save)

DECOMPOSITIONS: dict[Any, Callable[..., Any]] = {
    torch.ops.danlu.ring_attention.default: _attend_around,
    torch.ops.danlu.ring_attention_backward.default: _attend_around_backward,
}
"""The operators of this file, each with the function that runs its collectives and kernels one by one."""
