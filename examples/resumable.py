"""The same model in a loop that stops and resumes on any layout, with every part of the API.

    torchrun --nproc-per-node 2 examples/resumable.py checkpoints                      # states sharded over all ranks
    torchrun --nproc-per-node 4 examples/resumable.py checkpoints examples/tensor-2.toml   # continues, with a plan

Every start trains ten more steps. The order of the data is a function of the step, so none is repeated or skipped.
"""

import sys

import torch
import torch.nn.functional as F
from plain import BATCH, LENGTH, Gpt, text

import danlu

COLUMNS = {f"layers.*.{name}": "column" for name in ("q", "k", "v", "up")}
ROWS = {f"layers.*.{name}": "row" for name in ("out", "down")}


def main(folder: str, *plan: str) -> None:
    """Train ten steps from the newest checkpoint in `folder`."""
    torch.manual_seed(0)
    example = torch.arange(64).view(1, 64)
    model = danlu.parallelize(Gpt(), danlu.plan(*plan), tensor=COLUMNS | ROWS, example=example)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    samples = text().unfold(0, LENGTH + 1, LENGTH)
    sampler = danlu.StepSampler(len(samples), BATCH, model, seed=7)
    checkpoints = danlu.Checkpointer(folder, model, optimizer)
    mesh = danlu.get_mesh(model)
    first = checkpoints.load()
    with danlu.Guard(model) as guard:
        for step in range(first, first + 10):
            rows = samples[sampler.at(step)].to(mesh.device)
            loss = F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
            loss.backward()
            if guard.commit(loss):
                optimizer.step()
            optimizer.zero_grad()
            if mesh.rank == 0:
                print(f"step {step} loss {guard.loss:.6f} norm {guard.norm:.6f}", flush=True)
            if guard.stop:
                break
        checkpoints.save(step + 1)


if __name__ == "__main__":
    main(*sys.argv[1:])
