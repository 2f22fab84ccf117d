"""One rank of the tests of collectives: runs every case of its world size, one after the other."""

import json
import math
import sys
import traceback
from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from checkpoint_cases import (
    a_flipped_bit_is_found_by_all,
    a_lost_host_is_served_from_anothers_memory,
    a_lost_pack_is_mended_from_parity,
    a_save_that_fails_on_one_rank_is_given_up_on_all,
    a_save_that_was_cut_short,
    in_the_background,
    load_on_one_rank,
    load_on_one_rank_what_differs,
    memory_serves_what_the_disk_lost,
    normal,
    older_ones_stay_until_all_ranks_have_read_back,
    save_and_load,
    tensors_that_differ_under_chunks_that_verify,
    the_hosts_own_disk_serves_what_the_store_lost,
    what_is_not_finite_is_set_aside,
)
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from danlu.comm.mesh import build_mesh
from danlu.comm.rendezvous import RankInfo, rendezvous
from danlu.comm.world import World
from danlu.framework.decoder.attention import CoreAttention
from danlu.framework.decoder.moe import Experts, LocalDispatcher, Router, through_experts
from danlu.parallel.chunk_transfer import ChunkTransfer
from danlu.parallel.chunked_dispatch import ChunkedDispatcher
from danlu.parallel.context import UlyssesAttention
from danlu.parallel.deduplicated_dispatch import DeduplicatedDispatcher
from danlu.parallel.expert import AllToAllDispatcher
from danlu.parallel.grad_norm import clip_grads_with_norm, local_squared_norm
from danlu.parallel.loss import cross_entropy_sum
from danlu.spec.model import Moe
from danlu.spec.plan import Degrees, Plan

CPU = torch.device("cpu")
Case = Callable[[Path], None]


def close(found: Tensor | None, expected: Tensor | None) -> None:
    assert found is not None and expected is not None
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def world_group() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


# --- loss


def split_cross_entropy(folder: Path) -> None:
    targets = torch.randint(12, (2, 5), generator=torch.Generator().manual_seed(1))
    ordinary, extreme = normal(2, 5, 12), normal(2, 5, 12, seed=2) * 1e4
    for scores in (ordinary, extreme, ordinary.bfloat16()):
        whole = scores.clone().requires_grad_()
        expected = F.cross_entropy(whole.flatten(0, 1).float(), targets.flatten(), reduction="sum")
        (expected * 0.3).backward()
        part = scores.chunk(2, dim=-1)[dist.get_rank()].clone().requires_grad_()
        found = cross_entropy_sum(part, targets, world_group())
        (found * 0.3).backward()
        assert found.dtype == torch.float32
        close(found, expected)
        assert part.grad is not None and whole.grad is not None
        close(part.grad, whole.grad.chunk(2, dim=-1)[dist.get_rank()])


# --- context parallelism


def exchanged_core(folder: Path) -> None:
    """Key-value heads as many as heads, fewer, and fewer than ranks, so that they are repeated."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for kv_heads, theta in ((8, None), (2, 100.0), (1, 100.0)):
        shapes = ((2, 8, 8, 4), (2, 8, kv_heads, 4), (2, 8, kv_heads, 4))
        whole = [normal(*shape, seed=number).requires_grad_() for number, shape in enumerate(shapes)]
        weight = normal(*shapes[0], seed=9)  # makes every element of the result count differently
        core = CoreAttention(theta)
        expected = core(*whole)
        (expected * weight).sum().backward()
        parts = [x.detach().chunk(ranks, dim=1)[rank].clone().requires_grad_() for x in whole]
        found = UlyssesAttention(core, world_group())(*parts)
        (found * weight.chunk(ranks, dim=1)[rank]).sum().backward()
        close(found, expected.chunk(ranks, dim=1)[rank])
        for part, x in zip(parts, whole, strict=True):
            assert x.grad is not None
            close(part.grad, x.grad.chunk(ranks, dim=1)[rank])


# --- experts


def experts(weights: Mapping[str, Tensor]) -> Experts:
    count = len(weights["up"])
    made = Experts(6, Moe(experts=count, top_k=1, width=4), "swiglu")
    made.load_state_dict(dict(weights))
    return made


def expert_exchange(folder: Path) -> None:
    """Counts of both ranks over four experts, two a rank: uneven, with experts, senders and receivers left empty."""
    rank = dist.get_rank()
    weights = {"gate": normal(4, 6, 4, seed=1), "up": normal(4, 6, 4, seed=2), "down": normal(4, 4, 6, seed=3)}
    for counts in (
        [[3, 2, 0, 5], [1, 4, 3, 4]],  # an expert's tokens come in two pieces
        [[0, 0, 0, 0], [0, 7, 0, 1]],
        [[5, 0, 0, 0], [2, 4, 0, 0]],
        [[0, 0, 0, 0], [0, 0, 0, 0]],
    ):
        inputs = [normal(sum(row), 6, seed=number + 5).requires_grad_() for number, row in enumerate(counts)]
        everyone = experts(weights)
        answers = [LocalDispatcher()(x, torch.tensor(row), everyone) for x, row in zip(inputs, counts, strict=True)]
        sum((answer.square().sum() for answer in answers), start=torch.zeros(())).backward()

        held = slice(2 * rank, 2 * rank + 2)
        mine = experts({name: weight[held] for name, weight in weights.items()})
        x = inputs[rank].detach().clone().requires_grad_()
        found = AllToAllDispatcher(world_group())(x, torch.tensor(counts[rank]), mine)
        found.square().sum().backward()
        close(found, answers[rank])
        close(x.grad, inputs[rank].grad)
        for name, parameter in mine.named_parameters():
            whole = everyone.get_parameter(name).grad
            assert whole is not None
            close(parameter.grad, whole[held])


def tokens_sent_once(folder: Path) -> None:
    """Four ranks on two levels, each level passed once."""
    world = World.adopt()
    levels = partial(world.level_groups, range(4), (2, 2))
    _tokens_through(lambda number: DeduplicatedDispatcher(levels(f"case {number}"), 8))
    _tokens_through(lambda number: DeduplicatedDispatcher(levels(f"chunked {number}"), 8, chunks=(2, 3, 4, 2)[number]))


def tokens_sent_in_parts(folder: Path) -> None:
    """Four ranks, in more and more parts; of some cases more than there are tokens."""
    _tokens_through(lambda number: ChunkedDispatcher(world_group(), 8, chunks=(1, 2, 3, 4)[number]))


def what_is_not_a_number_stays_in_its_row(folder: Path) -> None:
    """However tokens are sent: the answer to such a token shows it, and no other does."""
    world, rank = World.adopt(), dist.get_rank()
    levels = partial(world.level_groups, range(4), (2, 2))
    weights = {"gate": normal(8, 6, 4, seed=1), "up": normal(8, 6, 4, seed=2), "down": normal(8, 4, 6, seed=3)}
    mine = experts({name: weight[2 * rank : 2 * rank + 2] for name, weight in weights.items()})
    x = normal(6, 6, seed=rank)
    x[2, 1], x[4, 0] = math.nan, math.inf
    chosen = torch.stack([torch.randperm(8, generator=torch.Generator().manual_seed(row))[:3] for row in range(6)])
    counts = chosen.flatten().bincount(minlength=8)
    for dispatcher in (
        AllToAllDispatcher(world_group()),
        ChunkedDispatcher(world_group(), 8, 2),
        DeduplicatedDispatcher(levels("not a number"), 8),
        DeduplicatedDispatcher(levels("not a number, in parts"), 8, chunks=2),
    ):
        found = through_experts(x, chosen, torch.ones(6, 3), 3, counts, dispatcher, mine)
        assert found.isfinite().all(1).tolist() == [row not in (2, 4) for row in range(6)], dispatcher


def parts_are_computed_while_others_are_under_way(folder: Path) -> None:
    """When a part is computed, the next one has been sent, and so have the answers to the one before."""
    sent: list[int] = []
    begun, seen = ChunkTransfer.begin, []

    def begin(transfer: ChunkTransfer, chunk: int, x: Tensor) -> None:
        sent.append(chunk)
        begun(transfer, chunk, x)

    def compute(x_ND: Tensor, counts: list[int] | Any) -> Tensor:
        if callable(counts):
            return counts(x_ND, compute)
        seen.append(tuple(sent))
        x_ND.register_hook(lambda _: seen.append(tuple(sent)))  # after this part's backward pass
        return x_ND * 2

    ChunkTransfer.begin = begin  # type: ignore[method-assign]
    x = normal(6, 4).requires_grad_()
    found = ChunkedDispatcher(world_group(), 4, 3)(x, torch.arange(6).view(6, 1) % 4, torch.ones(6, 1), compute)
    assert seen == [(0, 1), (0, 1, 0, 2), (0, 1, 0, 2, 1)], "there: 0, 1, 2; back: 0, 1, 2"
    seen.clear(), sent.clear()
    found.sum().backward()
    assert seen == [(2, 1), (2, 1, 2, 0), (2, 1, 2, 0, 1)], "the same from the last"
    ChunkTransfer.begin = begun  # type: ignore[method-assign]
    close(x.grad, torch.full_like(x, 2))


def _tokens_through(make: Callable[[int], nn.Module]) -> None:
    """Two experts a rank: many experts of a token, one, and ranks or experts without tokens."""
    rank = dist.get_rank()
    weights = {"gate": normal(8, 6, 4, seed=1), "up": normal(8, 6, 4, seed=2), "down": normal(8, 4, 6, seed=3)}
    everyone, held = experts(weights), slice(2 * rank, 2 * rank + 2)
    for number, (tokens, top_k, used) in enumerate(((5, 4, 8), (7, 1, 8), (3, 2, 3), (0, 2, 8))):
        counts = [tokens, 2 * tokens, 0, tokens]  # of every rank
        drawn = torch.Generator().manual_seed(number)
        every = [torch.rand(count, used, generator=drawn).topk(top_k).indices for count in counts]
        x = normal(counts[rank], 6, seed=10 + rank).requires_grad_()
        shares = normal(counts[rank], top_k, seed=20 + rank).requires_grad_()
        expected = through_experts(
            x, every[rank], shares, top_k, every[rank].flatten().bincount(minlength=8), LocalDispatcher(), everyone
        )
        wanted = torch.autograd.grad(expected.square().sum(), [x, shares])

        mine = experts({name: weight[held] for name, weight in weights.items()})
        found = through_experts(x, every[rank], shares, top_k, torch.zeros(8), make(number), mine)
        found.square().sum().backward()
        close(found, expected)
        close(x.grad, wanted[0])
        close(shares.grad, wanted[1])


def auxiliary_loss_of_split_sequences(folder: Path) -> None:
    moe = Moe(experts=4, top_k=2, width=4, balance_rate=0.5)
    x = normal(3, 8, 6)

    def run(tokens: Tensor, group: dist.ProcessGroup | None) -> tuple[Tensor, Tensor]:
        router = Router(6, moe)
        router.sequences_per_step, router.sequence_group = 3, group
        with torch.no_grad():
            router.gate.weight.copy_(normal(4, 6, seed=1))
        loss = router(tokens)[3]
        loss.backward()
        assert router.gate.weight.grad is not None
        return loss.detach(), router.gate.weight.grad

    whole = run(x, None)
    parts = run(x.chunk(2, dim=1)[dist.get_rank()], world_group())
    for found, expected in zip(parts, whole, strict=True):
        dist.all_reduce(found)
        close(found, expected)


# --- norm


def norm_of_mixed_placements(folder: Path) -> None:
    """Sharded unevenly, replicated as a DTensor, and held whole by every rank."""
    mesh = init_device_mesh("cpu", (2,))
    gradients = [normal(5, 3, seed=1), normal(4, seed=2), normal(2, 2, seed=3), normal(1, 3, seed=4)]
    placements: list[list[Placement] | None] = [[Shard(0)], [Replicate()], None, [Shard(0)]]
    parameters = []
    for gradient, placement in zip(gradients, placements, strict=True):
        held = gradient.clone()  # clipping is in place, and a replica shares the memory it was made from
        value = held if placement is None else distribute_tensor(held, mesh, placement)
        parameter = nn.Parameter(torch.zeros_like(value))
        parameter.grad = value
        parameters.append(parameter)
    check_norm_and_clip(parameters, gradients)


def norm_of_fsdp_over_tp(folder: Path) -> None:
    """Both shard dimension 0, the outer axis within the pieces of the inner one: FSDP's strided placement."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tp"))
    layer = nn.Linear(6, 8)
    parallelize_module(layer, mesh["tp"], ColwiseParallel())
    fully_shard(layer, mesh=mesh["shard"])
    gradients = [normal(8, 6, seed=1), normal(8, seed=2)]
    for parameter, gradient in zip(layer.parameters(), gradients, strict=True):
        assert isinstance(parameter, DTensor)
        parameter.grad = distribute_tensor(gradient.clone(), parameter.device_mesh, parameter.placements)
    check_norm_and_clip(list(layer.parameters()), gradients)


def check_norm_and_clip(parameters: list[nn.Parameter], gradients: list[Tensor]) -> None:
    expected = torch.cat([gradient.flatten() for gradient in gradients]).norm()
    square = local_squared_norm(parameters, dist.get_world_size(), CPU)
    dist.all_reduce(square)
    close(square.sqrt(), expected)
    clip_grads_with_norm(parameters, float(square.sqrt()), 0.5)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        assert parameter.grad is not None
        whole = parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad
        close(whole, gradient * (0.5 / expected))


# --- groups


def groups_of_a_mesh(folder: Path) -> None:
    rank = dist.get_rank()
    mesh = build_mesh(Plan(degrees=Degrees(cp=2, tp=2)), World.adopt(), None, experts=False)
    tensor, context, everyone = mesh.group("tp"), mesh.group("cp"), mesh.group("cp", "tp")
    assert tensor is not None and context is not None and everyone is dist.group.WORLD
    assert dist.get_process_group_ranks(tensor) == ([0, 1] if rank < 2 else [2, 3])
    assert dist.get_process_group_ranks(context) == [rank % 2, rank % 2 + 2]
    assert mesh.group("pp") is None and mesh.ep_mesh is None
    total = torch.tensor(float(rank))
    dist.all_reduce(total, group=context)
    assert total == 2 * (rank % 2) + 2


CASES: dict[int, tuple[Case, ...]] = {
    4: (
        exchanged_core,
        norm_of_fsdp_over_tp,
        groups_of_a_mesh,
        tokens_sent_once,
        tokens_sent_in_parts,
        what_is_not_a_number_stays_in_its_row,
    ),
    2: (
        split_cross_entropy,
        exchanged_core,
        expert_exchange,
        parts_are_computed_while_others_are_under_way,
        auxiliary_loss_of_split_sequences,
        norm_of_mixed_placements,
        save_and_load,
        a_save_that_was_cut_short,
        a_flipped_bit_is_found_by_all,
        a_lost_pack_is_mended_from_parity,
        memory_serves_what_the_disk_lost,
        a_lost_host_is_served_from_anothers_memory,
        the_hosts_own_disk_serves_what_the_store_lost,
        what_is_not_finite_is_set_aside,
        a_save_that_fails_on_one_rank_is_given_up_on_all,
        in_the_background,
        older_ones_stay_until_all_ranks_have_read_back,
        tensors_that_differ_under_chunks_that_verify,
    ),
    1: (load_on_one_rank, load_on_one_rank_what_differs),
}
"""By world size, in the order they are run: those of checkpoints build on each other."""


def main() -> None:
    rank, world, port, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4])
    torch.set_num_threads(1)
    place = RankInfo(rank=rank, world_size=world, local_rank=rank, endpoint=f"127.0.0.1:{port}", token=bytes(32))
    joined = World.join(place, "gloo", rendezvous(place), timeout=timedelta(seconds=60))
    results: dict[str, str] = {}
    for case in CASES[world]:
        try:
            case(folder)
            results[case.__name__] = "passed"
        except Exception:
            results[case.__name__] = traceback.format_exc()
            break  # the other ranks wait for this one in vain: what follows would say nothing
    (folder / f"{world}-{rank}.json").write_text(json.dumps(results))
    joined.shutdown()


if __name__ == "__main__":
    main()
