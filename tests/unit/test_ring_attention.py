"""Attention over the blocks of a ring, merged, is that over the full sequence, gradients included; in one process."""

import math

import pytest
import torch
import torch.nn.functional as F
from made_meshes import place_of
from torch import Tensor

from danlu import torch_compat
from danlu.memory.recompute import SAVED_OPS
from danlu.ops.operators import attention_block
from danlu.ops.operators.attention_block import BlockMask, attend, attend_backward, merge
from danlu.parallel.ring_attention import DECOMPOSITIONS, ring_blocks
from danlu.parallel.sequence_shard import SequenceShard, sequence_shard

RANKS, HELD = 3, 8
LENGTH = RANKS * HELD
SHARDS = [SequenceShard(rank, RANKS, zigzag=True) for rank in range(RANKS)]


def documents() -> Tensor:
    """Where the document of every token begins, for two rows: borders at, before and after those of chunks."""
    first = torch.zeros(2, LENGTH, dtype=torch.int64)
    for row, starts in enumerate(([4, 9, 10, 17], [1, 12, 23])):
        for start in starts:
            first[row, start:] = start
    return first


def inputs(width: int, value_width: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries of four heads, keys and values of two, and the gradient of the result."""
    made = torch.Generator().manual_seed(3)
    shapes = ((4, width), (2, width), (2, value_width), (4, value_width))
    q, k, v, grad = (torch.randn(2, LENGTH, *shape, generator=made).to(dtype) for shape in shapes)
    return q, k, v, grad


def expected(q: Tensor, k: Tensor, v: Tensor, grad: Tensor, first: Tensor | None) -> list[Tensor]:
    """Result and gradients of torch's own attention over full sequences."""
    given = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    place = torch.arange(LENGTH)
    seen = (place <= place[:, None])[None] if first is None else (place <= place[:, None]) & (place >= first[..., None])
    heads = [x.transpose(1, 2) for x in given]
    out = F.scaled_dot_product_attention(*heads, attn_mask=seen[:, None], enable_gqa=True).transpose(1, 2)
    out.backward(grad)
    return [out.detach(), *(x.grad for x in given if x.grad is not None)]


def around(q: Tensor, k: Tensor, v: Tensor, grad: Tensor, first: Tensor | None) -> list[Tensor]:
    """The same, every rank's blocks one after another, without a network."""
    found = [torch.zeros(*q.shape[:3], v.shape[-1]), torch.zeros(q.shape), torch.zeros(k.shape), torch.zeros(v.shape)]
    for shard in SHARDS:
        mine, starts = shard.positions(HELD, q.device), None if first is None else shard.take(first)
        q_mine, grad_mine = (x[:, mine].transpose(1, 2) for x in (q, grad))
        blocks = list(ring_blocks(shard, HELD, starts, q.dtype))
        out = torch.zeros(*q_mine.shape[:3], v.shape[-1])
        logsumexp = torch.full(q_mine.shape[:3], -math.inf)
        sources = [SHARDS[(shard.rank - turn) % RANKS].positions(HELD, q.device) for turn in range(RANKS)]
        seen = [
            [x[:, keys[block.keys]].transpose(1, 2) for x in (k, v)]
            for keys, block in zip(sources, blocks, strict=True)
        ]
        for (queries, _, mask), kv in zip(blocks, seen, strict=True):
            merge(out[:, :, queries], logsumexp[:, :, queries], *attend(q_mine[:, :, queries], *kv, mask))
        found[0][:, mine] = out.transpose(1, 2)
        out = out.to(q.dtype)
        for (queries, keys, mask), kv, place in zip(blocks, seen, sources, strict=True):
            rows = [x[:, :, queries] for x in (grad_mine, q_mine)]
            gradients = attend_backward(*rows, *kv, out[:, :, queries], logsumexp[:, :, queries], mask)
            for total, where, more in zip(found[1:], (mine[queries], place[keys], place[keys]), gradients, strict=True):
                total[:, where] += more.transpose(1, 2)
    return found


@pytest.mark.parametrize("value_width", [8, 4, 12])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("kernel", ["fused", "plain"])
def test_blocks_of_a_ring_merge_into_attention(
    kernel: str, packed: bool, value_width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kernel == "plain":
        monkeypatch.setattr(attention_block, "flash_attention", lambda *_, **__: None)
        monkeypatch.setattr(attention_block, "flash_attention_backward", lambda *_, **__: None)
    given, first = inputs(8, value_width), documents() if packed else None
    for found, wanted in zip(around(*given, first), expected(*given, first), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=2e-6)


def test_blocks_merge_in_bf16_within_its_rounding() -> None:
    given = inputs(8, 8, torch.bfloat16)
    for found, wanted in zip(around(*given, documents()), expected(*given, documents()), strict=True):
        torch.testing.assert_close(found, wanted.float(), rtol=2e-2, atol=4e-2)


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_every_visible_pair_is_computed_once_and_work_is_equal(ranks: int) -> None:
    held = 4
    counts = torch.zeros(ranks * held, ranks * held)
    work = []
    for rank in range(ranks):
        shard = SequenceShard(rank, ranks, zigzag=True)
        mine = shard.positions(held, torch.device("cpu"))
        for turn, (queries, keys, mask) in enumerate(ring_blocks(shard, held, None, torch.float32)):
            source = shard._replace(rank=(rank - turn) % ranks).positions(held, torch.device("cpu"))
            block = torch.ones(len(mine[queries]), len(source[keys]))
            block = block.tril() if mask.causal else block
            work.append((turn > 0, int(block.sum())))
            counts[mine[queries][:, None], source[keys]] += block
    assert torch.equal(counts, torch.ones_like(counts).tril())
    assert len(set(work)) == 2  # one number for a rank's own block, one for all others


def test_a_query_that_sees_nothing_of_a_block_gets_nothing_from_it() -> None:
    """Neither NaN nor a weight: hidden scores are finite, and merging weighs them by exactly 0."""
    q, k, v, _ = (x.transpose(1, 2) for x in inputs(8, 8))
    hidden = torch.full((2, 1, LENGTH, LENGTH), attention_block.hidden_score(torch.float32))
    seen, logsumexp = attend(q, k, v, BlockMask())
    out, total = seen.clone(), logsumexp.clone()
    merge(out, total, *attend(q, k, v, BlockMask(added_B1ST=hidden)))
    assert torch.equal(out, seen)
    assert torch.equal(total, logsumexp)


def test_chunks_are_shared_out_from_both_ends() -> None:
    parts = [shard.positions(4, torch.device("cpu")).tolist() for shard in (s._replace(ranks=3) for s in SHARDS)]
    assert parts == [[0, 1, 10, 11], [2, 3, 8, 9], [4, 5, 6, 7]]
    rows = torch.arange(24).view(2, 12)
    assert SHARDS[1].take(rows).tolist() == [[2, 3, 8, 9], [14, 15, 20, 21]]
    assert SequenceShard(1, 3).take(rows).tolist() == [[4, 5, 6, 7], [16, 17, 18, 19]]


def test_the_plan_says_which_positions_a_rank_holds() -> None:
    assert sequence_shard(place_of(1, cp=2)) == SequenceShard(1, 2, zigzag=False)
    ring = place_of(1, cp=2)
    ring.plan.__dict__["context_parallel"] = "ring"
    assert sequence_shard(ring) == SequenceShard(1, 2, zigzag=True)


def test_what_selective_recompute_keeps_exists() -> None:
    assert {operator.name() for operator in DECOMPOSITIONS} & SAVED_OPS == {"danlu::ring_attention"}
    for name in SAVED_OPS:
        namespace, _, operator = name.partition("::")
        assert getattr(getattr(torch.ops, namespace), operator).default.name() == name


def test_the_kernel_of_accelerators_takes_what_it_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its arguments in every supported torch, on tensors without values: no accelerator is needed."""
    monkeypatch.setattr(torch_compat, "_flash_kernel", lambda *_: "accelerator")
    q, k, v = (torch.empty(2, 4, length, 64, device="meta", dtype=torch.bfloat16) for length in (16, 32, 32))
    found = torch_compat.flash_attention(q, k, v, causal=False, added=None, scale=0.125)
    assert found is not None
    out, logsumexp = found
    assert (out.shape, logsumexp.shape, logsumexp.dtype) == (q.shape, q.shape[:3], torch.float32)
    gradients = torch_compat.flash_attention_backward(
        torch.empty_like(out), q, k, v, out, logsumexp, causal=False, added=None, scale=0.125
    )
    assert gradients is not None
    assert [x.shape for x in gradients] == [q.shape, k.shape, v.shape]
