"""One rank that saves with PyTorch's own distributed checkpoint: `dcp_rank.py rank world port folder`."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor


def tensors() -> dict[str, torch.Tensor]:
    """What is saved, whole."""
    torch.manual_seed(0)
    return {
        "model.rows": torch.randn(7, 5),
        "model.columns": torch.randn(3, 8).to(torch.bfloat16),
        "model.turned": torch.randn(4, 3).t(),  # saved with the strides it has
        "model.view": torch.randn(10, 4)[2:5],
        "optimizer.step": torch.tensor(3.0),
        "ids": torch.arange(6),
        "mask": torch.tensor([True, False, True]),
        "small": torch.randn(9).to(torch.float8_e4m3fn),
    }


def main() -> None:
    rank, world, port, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4])
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    mesh = init_device_mesh("cpu", (world,))
    state: dict[str, object] = dict(tensors())
    for name, dim in (("model.rows", 0), ("model.columns", 1)):
        whole = state[name]
        assert isinstance(whole, torch.Tensor)
        state[name] = distribute_tensor(whole, mesh, [Shard(dim)])
    dcp.save(state | {"settings": {"lr": 0.5}}, checkpoint_id=folder)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
