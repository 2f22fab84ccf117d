"""One rank of the tests of collectives: runs every case of its world size, one after the other."""

import json
import re
import shutil
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from danlu.comm.join import Place, join, leave, meet
from danlu.comm.mesh import build_mesh
from danlu.framework.moe import Experts, LocalExchange, Router
from danlu.framework.transformer import AttentionCore
from danlu.parallel.context import ExchangedCore
from danlu.parallel.expert import ExpertExchange
from danlu.parallel.loss import cross_entropy_sum
from danlu.parallel.norm import clip, local_square_sum
from danlu.spec.model import Moe
from danlu.spec.plan import Degrees, Plan
from danlu.storage.checkpoint.checkpoints import Checkpoints, open_checkpoints
from danlu.storage.checkpoint.saver import Policy
from danlu.storage.store import open_store

CPU = torch.device("cpu")
Case = Callable[[Path], None]


def normal(*shape: int, seed: int = 0) -> Tensor:
    """The same numbers on every rank."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


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
        core = AttentionCore(theta)
        expected = core(*whole)
        (expected * weight).sum().backward()
        parts = [x.detach().chunk(ranks, dim=1)[rank].clone().requires_grad_() for x in whole]
        found = ExchangedCore(core, world_group())(*parts)
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
        answers = [LocalExchange()(x, torch.tensor(row), everyone) for x, row in zip(inputs, counts, strict=True)]
        sum((answer.square().sum() for answer in answers), start=torch.zeros(())).backward()

        held = slice(2 * rank, 2 * rank + 2)
        mine = experts({name: weight[held] for name, weight in weights.items()})
        x = inputs[rank].detach().clone().requires_grad_()
        found = ExpertExchange(world_group())(x, torch.tensor(counts[rank]), mine)
        found.square().sum().backward()
        close(found, answers[rank])
        close(x.grad, inputs[rank].grad)
        for name, parameter in mine.named_parameters():
            whole = everyone.get_parameter(name).grad
            assert whole is not None
            close(parameter.grad, whole[held])


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
    square = local_square_sum(parameters, dist.get_world_size(), CPU)
    dist.all_reduce(square)
    close(square.sqrt(), expected)
    clip(parameters, float(square.sqrt()), 0.5)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        assert parameter.grad is not None
        whole = parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad
        close(whole, gradient * (0.5 / expected))


# --- groups


def groups_of_a_mesh(folder: Path) -> None:
    rank = dist.get_rank()
    mesh = build_mesh(Plan(degrees=Degrees(cp=2, tp=2)), CPU, rank, None, experts=False)
    tensor, context, everyone = mesh.group("tp"), mesh.group("cp"), mesh.group("cp", "tp")
    assert tensor is not None and context is not None and everyone is dist.group.WORLD
    assert dist.get_process_group_ranks(tensor) == ([0, 1] if rank < 2 else [2, 3])
    assert dist.get_process_group_ranks(context) == [rank % 2, rank % 2 + 2]
    assert mesh.group("pp") is None and mesh.experts is None
    total = torch.tensor(float(rank))
    dist.all_reduce(total, group=context)
    assert total == 2 * (rank % 2) + 2


# --- checkpoints


def tensors(seed: int, placement: Placement) -> dict[str, Tensor]:
    """A matrix that does not divide over two ranks, one that every rank holds, and a counter."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {
        "model.blocks.0.weight": distribute_tensor(normal(5, 3, seed=seed), mesh, [placement]),
        "model.norm": distribute_tensor(normal(4, seed=seed + 1), mesh, [Replicate()]),
        "optimizer.step": torch.tensor(float(seed)),
    }


def whole(held: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: x.full_tensor() if isinstance(x, DTensor) else x for name, x in held.items()}


def checkpoints_in(folder: Path) -> Checkpoints:
    return open_checkpoints(folder / "checkpoints", 2, torch.device("cpu"))


def refused(message: str, act: Callable[[], Any]) -> None:
    with pytest.raises(RuntimeError, match=re.escape(message)):
        act()


def save_and_load(folder: Path) -> None:
    checkpoints = checkpoints_in(folder)
    assert checkpoints.latest() is None and checkpoints.shelf.steps() == []
    saved = tensors(10, Shard(0))
    outcome = checkpoints.save(10, saved, {"step": 10, "cursor": 80})
    assert outcome.path == str(folder / "checkpoints" / "step-00000010")
    refused(
        "exists already; it is left as it is" if dist.get_rank() == 0 else "could not be saved by another rank",
        lambda: checkpoints.save(10, tensors(11, Shard(0)), {}),
    )
    read = tensors(99, Shard(1))
    scalars, proof = checkpoints.load(10, read)
    assert scalars == {"step": 10, "cursor": 80}
    assert proof.tensors == 3
    expected = whole(saved)
    for name, tensor in whole(read).items():
        assert torch.equal(tensor, expected[name]), name
    dist.barrier()
    checkpoints.close()


def a_save_that_was_cut_short(folder: Path) -> None:
    """What it left is never taken for a checkpoint, and does not mix with the next save of that step."""
    checkpoints = checkpoints_in(folder)
    left = folder / "checkpoints" / "step-00000020"
    if dist.get_rank() == 0:
        left.mkdir()
        (left / "00000000-000000.pack").write_text("half of it")
        (left / "00000000-000000.json").write_text("{}")
    dist.barrier()
    assert checkpoints.shelf.steps() == [10] and checkpoints.latest() == 10
    checkpoints.save(20, tensors(20, Shard(0)), {"step": 20})
    assert checkpoints.load(20, tensors(99, Shard(0)))[0] == {"step": 20}
    assert checkpoints.shelf.steps() == [10, 20]
    checkpoints.close()  # or the next case would read from memory what the disk has lost


def a_flipped_bit_is_found_by_all(folder: Path) -> None:
    """Also by the ranks that read nothing of what is damaged."""
    checkpoints = checkpoints_in(folder)  # a new one: nothing of it is in memory
    if dist.get_rank() == 0:
        pack = sorted((folder / "checkpoints" / "step-00000020").glob("*-000001.pack"))[-1]
        content = bytearray(pack.read_bytes())
        content[3] ^= 1
        pack.write_bytes(content)
    dist.barrier()
    refused("damaged", lambda: checkpoints.load(20, tensors(99, Shard(0))))
    if dist.get_rank() == 0:
        content[3] ^= 1
        pack.write_bytes(content)
    dist.barrier()


def a_lost_pack_is_mended_from_parity(folder: Path) -> None:
    checkpoints = open_checkpoints(folder / "parity", 2, torch.device("cpu"), policy=Policy(parity=1, group=2))
    saved = tensors(10, Shard(0))
    checkpoints.save(10, saved, {"step": 10})
    checkpoints.close()  # the copy in memory goes with it
    dist.barrier()
    if dist.get_rank() == 0:
        (pack,) = (folder / "parity" / "step-00000010").glob("*-000001.pack")
        pack.unlink()
    dist.barrier()
    again = open_checkpoints(folder / "parity", 2, torch.device("cpu"))
    read = tensors(99, Shard(1))
    again.load(10, read)
    expected = whole(saved)
    for name, tensor in whole(read).items():
        assert torch.equal(tensor, expected[name]), name
    assert any("mended from parity" in line for line in again.mended)
    again.close()


def memory_serves_what_the_disk_lost(folder: Path) -> None:
    """While a rank's buffers are there, they are the nearest copy, and the one that is right."""
    checkpoints = open_checkpoints(folder / "memory", 2, torch.device("cpu"))
    saved = tensors(10, Shard(0))
    checkpoints.save(10, saved, {"step": 10})
    dist.barrier()
    if dist.get_rank() == 0:
        for pack in (folder / "memory" / "step-00000010").glob("*.pack"):
            pack.write_bytes(b"")
    dist.barrier()
    read = tensors(99, Shard(1))
    checkpoints.load(10, read)
    expected = whole(saved)
    for name, tensor in whole(read).items():
        assert torch.equal(tensor, expected[name]), name
    dist.barrier()
    checkpoints.close()


def as_two_hosts(folder: Path, policy: Policy | None = None) -> Checkpoints:
    """Every rank as if it had a host of its own, with its own memory."""
    memory = folder / f"host-{dist.get_rank()}"
    made = Checkpoints(open_store(str(folder / "far")), 2, torch.device("cpu"), staging=memory, policy=policy)
    book = PrefixStore(f"hosts-{len(list(folder.glob('opened-*')))}", dist.distributed_c10d._get_default_store())
    made.meet_neighbours(book, 0, "127.0.0.1:9")
    dist.barrier()
    (folder / f"opened-{dist.get_rank()}-{time.time_ns()}").touch()
    dist.barrier()
    return made


def a_lost_host_is_served_from_anothers_memory(folder: Path) -> None:
    """Rank 1's host is gone with all its memory, and the far store has lost its packs: rank 0's host has them."""
    folder = folder / "hosts"
    folder.mkdir(exist_ok=True)
    dist.barrier()
    checkpoints = as_two_hosts(folder)
    saved = tensors(10, Shard(0))
    checkpoints.save(10, saved, {"step": 10})
    outcome = checkpoints.save(20, tensors(20, Shard(0)), {"step": 20})
    assert not outcome.trouble, outcome.trouble
    mine = folder / f"host-{dist.get_rank()}"
    names = sorted(path.name[9:] for path in (mine / "step-00000020").iterdir())
    assert names == ["000000.pack", "000001.pack"], "its own and a copy of the other's"
    copies = {path.name[9:] for path in mine.glob("step-00000010/*")} - {f"{dist.get_rank():06d}.pack"}
    assert not copies, "the newest only"
    # Both processes die without a word: nothing is withdrawn. One host is replaced by an empty one.
    checkpoints._saver.neighbours.close()  # type: ignore[union-attr]
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder / "host-1")
        for pack in (folder / "far" / "step-00000020").glob("*.pack"):
            pack.unlink()
    dist.barrier()
    again = as_two_hosts(folder)
    read = tensors(99, Shard(1))
    again.load(20, read)
    expected = whole(tensors(20, Shard(0)))
    for name, tensor in whole(read).items():
        assert torch.equal(tensor, expected[name]), name
    (source,) = again.read_from
    assert source.startswith("peer ") if dist.get_rank() == 1 else source == str(folder / "host-0"), source
    dist.barrier()
    again.close()
    checkpoints.close()


def the_hosts_own_disk_serves_what_the_store_lost(folder: Path) -> None:
    near = folder / "near"

    def opened() -> Checkpoints:
        return open_checkpoints(folder / "away", 2, torch.device("cpu"), policy=Policy(near=near))

    checkpoints = opened()
    checkpoints.save(10, tensors(10, Shard(0)), {})
    checkpoints.save(20, tensors(20, Shard(0)), {})
    checkpoints.close()  # the copies in memory go with it
    assert sorted(path.name[9:] for path in near.glob("*/*")) == ["000000.pack", "000001.pack"], "the newest only"
    dist.barrier()
    if dist.get_rank() == 0:
        for pack in (folder / "away" / "step-00000020").glob("*.pack"):
            pack.unlink()
    dist.barrier()
    again = opened()
    read = tensors(99, Shard(1))
    again.load(20, read)
    expected = whole(tensors(20, Shard(0)))
    for name, tensor in whole(read).items():
        assert torch.equal(tensor, expected[name]), name
    assert list(again.read_from) == [str(near)]
    again.close()


def what_is_not_finite_is_set_aside(folder: Path) -> None:
    checkpoints = checkpoints_in(folder)
    broken = tensors(30, Shard(0))
    if dist.get_rank() == 1:
        broken["model.blocks.0.weight"].to_local()[0, 0] = float("nan")
    refused(
        "not finite, and is set aside" if dist.get_rank() == 0 else "could not be saved by another rank",
        lambda: checkpoints.save(30, broken, {"step": 30}),
    )
    assert checkpoints.latest() == 20
    assert checkpoints.shelf.quarantined() == [30]


def a_save_that_fails_on_one_rank_is_given_up_on_all(folder: Path) -> None:
    checkpoints = checkpoints_in(folder)
    write = checkpoints.store.write
    if dist.get_rank() == 1:

        def refuse(path: str, parts: Any) -> None:
            raise OSError(28, "No space left on device")

        checkpoints.store.write = refuse  # type: ignore[method-assign]
    refused(
        "step-00000035" if dist.get_rank() == 0 else "No space left",
        lambda: checkpoints.save(35, tensors(35, Shard(0)), {"step": 35}),
    )
    checkpoints.store.write = write  # type: ignore[method-assign]
    assert checkpoints.latest() == 20


def in_the_background(folder: Path) -> None:
    """The state may change once it has settled; what is saved is what it was."""
    checkpoints = checkpoints_in(folder)
    saved = tensors(40, Shard(0))
    assert checkpoints.begin(40, saved, {"step": 40}, overlap=True)
    checkpoints.settle()
    for tensor in saved.values():
        tensor.zero_()
    checkpoints.wait()
    (outcome,) = checkpoints.outcomes()
    assert not outcome.failure and outcome.stall < outcome.seconds
    assert checkpoints.shelf.steps() == [20, 40]
    assert not (folder / "checkpoints" / "step-00000010").exists()
    checkpoints.close()


def load_on_one_rank(folder: Path) -> None:
    """What two ranks saved, in one process and without a mesh."""
    checkpoints = checkpoints_in(folder)
    read = {"model.blocks.0.weight": torch.zeros(5, 3), "model.norm": torch.zeros(4), "optimizer.step": torch.zeros(())}
    assert checkpoints.load(40, read)[0] == {"step": 40}
    assert torch.equal(read["model.blocks.0.weight"], normal(5, 3, seed=40))
    assert torch.equal(read["model.norm"], normal(4, seed=41))
    assert read["optimizer.step"] == 40


CASES: dict[int, tuple[Case, ...]] = {
    4: (exchanged_core, norm_of_fsdp_over_tp, groups_of_a_mesh),
    2: (
        split_cross_entropy,
        exchanged_core,
        expert_exchange,
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
    ),
    1: (load_on_one_rank,),
}
"""By world size, in the order they are run: those of checkpoints build on each other."""


def main() -> None:
    rank, world, port, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4])
    torch.set_num_threads(1)
    place = Place(rank=rank, world=world, local_rank=rank, store=f"127.0.0.1:{port}")
    join(place, "gloo", meet(place), timeout=timedelta(seconds=60))
    results: dict[str, str] = {}
    for case in CASES[world]:
        try:
            case(folder)
            results[case.__name__] = "passed"
        except Exception:
            results[case.__name__] = traceback.format_exc()
            break  # the other ranks wait for this one in vain: what follows would say nothing
    (folder / f"{world}-{rank}.json").write_text(json.dumps(results))
    leave()


if __name__ == "__main__":
    main()
