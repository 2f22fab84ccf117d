"""A worker of torchrun, for `recovery.py`: plain FSDP2, and its state in the host's memory after every step.

torchrun … bare_recovery.py FOLDER
"""

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from danlu.framework.decoder.decoder import Decoder
from danlu.spec.load import load_model

SEQUENCES, LENGTH, VOCABULARY = 8, 32, 264


def main() -> None:
    folder = Path(sys.argv[1])
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    (folder / f"pid-{rank}").write_text(str(os.getpid()))
    mesh = init_device_mesh("cpu", (world,))
    torch.manual_seed(0)
    model = Decoder(load_model("tiny-llama").model_copy(update={"vocabulary": VOCABULARY}))
    for block in model.blocks.values():
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    kept, step = Path(f"/dev/shm/danlu-bare-{folder.name}-{os.getppid()}-{rank}"), 0
    if kept.exists():
        state = torch.load(kept, weights_only=False)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
    while True:
        torch.manual_seed(step * world + rank)
        tokens = torch.randint(0, VOCABULARY, (SEQUENCES // world, LENGTH + 1))
        logits = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        new = kept.with_suffix(".new")
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, new)
        new.rename(kept)
        if rank == 0:
            with (folder / "steps").open("a") as steps:
                steps.write(f"{time.time()} {os.environ['TORCHELASTIC_RESTART_COUNT']}\n")


if __name__ == "__main__":
    main()
