"""One rank of the parity of brought modules: bare PyTorch on one rank first, then every layout of its world size."""

import json
import sys
import traceback
from pathlib import Path

import brought
import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from brought_layouts import LAYOUTS, Brought, recipe
from parity_rank import whole_parameters
from torch import nn
from training import train_in_memory

from danlu.comm.join import Place, join, leave, meet
from danlu.storage.tokens import Dataset, TokenShards


def train_bare(layout: Brought, shards: Path) -> tuple[list[float], list[float], nn.Module]:
    """The undistributed self: the module in a loop of plain PyTorch."""
    made = recipe(layout, str(shards))
    data = Dataset(TokenShards.open(shards), made.batch.length, made.seed)
    torch.manual_seed(made.seed)
    module = getattr(brought, layout.factory)(**layout.arguments).train()
    decayed = [p for p in module.parameters() if p.ndim > 1]
    spared = [p for p in module.parameters() if p.ndim <= 1]
    settings = made.optimizer
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": settings.weight_decay}, {"params": spared, "weight_decay": 0.0}],
        lr=settings.learning_rate,
        betas=(settings.beta1, settings.beta2),
        eps=settings.epsilon,
    )
    losses, norms = [], []
    for step in range(made.steps):
        first = step * made.batch.sequences
        rows = torch.from_numpy(data.at(np.arange(first, first + made.batch.sequences)))
        scores = module(rows[:, :-1])
        scores = scores if isinstance(scores, torch.Tensor) else scores.logits
        loss = F.cross_entropy(scores.flatten(0, 1), rows[:, 1:].flatten())
        loss.backward()
        norms.append(nn.utils.clip_grad_norm_(module.parameters(), settings.clip).item())
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms, module


def main() -> None:
    rank, world, port, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4])
    torch.set_num_threads(1)
    place = Place(rank=rank, world=world, local_rank=rank, store=f"127.0.0.1:{port}")
    store = meet(place)
    if world == 1:
        for layout in {layout.reference: layout for layout in LAYOUTS}.values():
            losses, norms, module = train_bare(layout, folder / "shards")
            (folder / f"bare-{layout.reference}.json").write_text(json.dumps({"loss": losses, "norm": norms}))
            values = {name: p.detach().numpy() for name, p in module.named_parameters()}
            np.savez(folder / f"bare-{layout.reference}.npz", **values)
    for number, layout in enumerate(each for each in LAYOUTS if each.plan.degrees.world == world):
        join(place, "gloo", dist.PrefixStore(f"layout{number}", store))
        try:
            reports, state = train_in_memory(recipe(layout, str(folder / "shards")), layout.plan, rank)
        except Exception:
            raise RuntimeError(f"{layout.name}: {traceback.format_exc()}") from None
        expected = json.loads((folder / f"bare-{layout.reference}.json").read_text())
        result: dict[str, object] = {"name": layout.name}
        for key in ("loss", "norm"):
            seen = [getattr(report, key) for report in reports]
            result[key] = max(abs(a - b) / abs(b) for a, b in zip(seen, expected[key], strict=True))
        with np.load(folder / f"bare-{layout.reference}.npz") as bare:
            parameters = whole_parameters(state)
            result["parameters"] = max(
                float(abs(value.numpy() - bare[name]).max()) for name, value in parameters.items()
            )
        (folder / f"brought-{world}-{number}-{rank}.json").write_text(json.dumps(result))
        leave()


if __name__ == "__main__":
    main()
