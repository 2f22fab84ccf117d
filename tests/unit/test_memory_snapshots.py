"""States in memory: whole or not used, whoever wrote them and however that process ended."""

import os
import signal
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from danlu.comm.world import World
from danlu.storage.checkpoint import memory_snapshots
from danlu.storage.checkpoint.memory_snapshots import RankSnapshots, SnapshotError


def state(value: float) -> dict[str, Tensor]:
    return {
        "weight": torch.full((5, 3), value),
        "step": torch.tensor(value),
        "none": torch.empty(0),
        "bf16": torch.full((7,), value, dtype=torch.bfloat16).t(),
    }


def restored(folder: Path, like: float = -1.0) -> tuple[float, int] | None:
    """What the next process of the rank finds: the value of its tensors and the step of its scalars."""
    tensors = state(like)
    found = RankSnapshots(folder, 0, tensors)
    scalars = found.restore(tensors, World())
    found.close()
    if scalars is None:
        assert all((tensor == like).all() for tensor in tensors.values())
        return None
    (value,) = {float(tensor.flatten()[0]) for tensor in tensors.values() if tensor.numel()}
    return value, scalars["step"]


def test_the_newest_of_two_is_found_by_the_next_process(tmp_path: Path) -> None:
    assert restored(tmp_path) is None
    taken = RankSnapshots(tmp_path, 0, state(0.0))
    for step in range(1, 6):
        taken.take(state(float(step)), {"step": step})
    taken.close()
    assert restored(tmp_path) == (5.0, 5)
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["000000-0", "000000-1"]


def test_a_process_that_dies_while_it_copies_leaves_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    child = os.fork()
    if child == 0:
        taken = RankSnapshots(tmp_path, 0, state(0.0))
        for step in (1, 2):
            taken.take(state(float(step)), {"step": step})

        def dies(targets: list[Tensor], sources: list[Tensor]) -> None:
            targets[0].copy_(sources[0])
            os.kill(os.getpid(), signal.SIGKILL)

        memory_snapshots.foreach_copy_ = dies  # type: ignore[attr-defined]
        taken.take(state(3.0), {"step": 3})
        os._exit(0)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    assert restored(tmp_path) == (2.0, 2)


@pytest.mark.parametrize("place", [4096 + 3, -1], ids=["a tensor", "the scalars"])
def test_one_wrong_bit_makes_a_snapshot_unusable(tmp_path: Path, place: int) -> None:
    taken = RankSnapshots(tmp_path, 0, state(0.0))
    for step in (1, 2):
        taken.take(state(float(step)), {"step": step})
    taken.close()
    newest = tmp_path / "000000-1"
    raw = bytearray(newest.read_bytes())
    at = place if place > 0 else raw.index(b'{"step": 2}') + 9
    raw[at] ^= 1
    newest.write_bytes(raw)
    assert restored(tmp_path) == (1.0, 1)


def test_a_state_of_other_tensors_is_not_restored(tmp_path: Path) -> None:
    taken = RankSnapshots(tmp_path, 0, {"other": torch.zeros(5, 3)})
    taken.take({"other": torch.ones(5, 3)}, {"step": 1})
    taken.close()
    assert restored(tmp_path) is None


@pytest.mark.parametrize(("placement", "differ"), [(Shard(0), True), (Replicate(), False)], ids=["sharded", "replicas"])
def test_another_part_of_the_same_tensor_is_another_state(tmp_path: Path, placement: Placement, differ: bool) -> None:
    signatures = []
    for rank in range(2):
        world = World.fake(rank, 2)
        try:
            mesh = init_device_mesh("cpu", (2,))
            tensor = DTensor.from_local(torch.zeros(4), mesh, [placement], run_check=False)
            taken = RankSnapshots(tmp_path, rank, {"weight": tensor})
            signatures.append(taken.signature)
            taken.close()
        finally:
            world.shutdown()
    assert (signatures[0] != signatures[1]) == differ


def test_numbers_go_on_from_the_restored_one(tmp_path: Path) -> None:
    taken = RankSnapshots(tmp_path, 0, state(0.0))
    taken.take(state(1.0), {"step": 1})
    taken.take(state(2.0), {"step": 2})
    taken.close()
    again = RankSnapshots(tmp_path, 0, state(0.0))
    assert again.restore(state(0.0), World()) == {"step": 2}
    again.take(state(3.0), {"step": 3})
    again.close()
    assert restored(tmp_path) == (3.0, 3)


def test_the_memory_of_a_living_process_is_nobody_elses(tmp_path: Path) -> None:
    taken = RankSnapshots(tmp_path, 0, state(0.0))
    with pytest.raises(BlockingIOError):
        RankSnapshots(tmp_path, 0, state(0.0))
    taken.close()
    RankSnapshots(tmp_path, 0, state(0.0)).close()


def test_scalars_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    taken = RankSnapshots(tmp_path, 0, state(0.0))
    with pytest.raises(SnapshotError, match="at most 262144 bytes"):
        taken.take(state(1.0), {"step": "x" * (1 << 18)})
    taken.close()
    assert restored(tmp_path) is None
