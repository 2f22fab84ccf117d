"""One rank of the parity of brought modules: bare PyTorch on one rank first, then the selected layouts."""

import json
import sys
import traceback
import warnings
from functools import partial
from pathlib import Path

import brought
import numpy as np
import torch
import torch.nn.functional as F
from brought_layouts import LAYOUTS, Brought, recipe
from deviations import compare, write_reference
from plain_loop import seed_layers
from torch import nn
from training import train_in_memory
from worlds import Worlds

from danlu.storage.data.token_shards import ShuffledDataset, TokenShards


def train_bare(layout: Brought, shards: Path) -> tuple[list[float], list[float], nn.Module]:
    """The undistributed self: the module in a loop of plain PyTorch, the batch in as many pieces as dropout saw."""
    made = recipe(layout, str(shards))
    data = ShuffledDataset(TokenShards.open(shards), made.batch.length, made.seed)
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
    words = seed_layers(module, module.layers) if isinstance(module, brought.PlainModel) else {}
    for step in range(made.steps):
        first = step * made.batch.sequences
        rows = torch.from_numpy(data.read_samples(np.arange(first, first + made.batch.sequences)))
        total = 0.0
        for number, piece in enumerate(rows.chunk(layout.pieces)):
            words.update(seed=made.seed, step=step, microbatch=number)
            scores = module(piece[:, :-1])
            scores = scores if isinstance(scores, torch.Tensor) else scores.logits
            loss = F.cross_entropy(scores.flatten(0, 1), piece[:, 1:].flatten()) / layout.pieces
            loss.backward()
            total += loss.item()
        norms.append(nn.utils.clip_grad_norm_(module.parameters(), settings.clip).item())
        losses.append(total)
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms, module


def train_reference(layout: Brought, folder: Path) -> None:
    losses, norms, module = train_bare(layout, folder / "shards")
    values = {name: p.detach() for name, p in module.named_parameters()}
    write_reference(folder, f"bare-{layout.reference}", losses, norms, values)


def train_layout(layout: Brought, rank: int, folder: Path) -> None:
    with warnings.catch_warnings(record=bool(layout.warns)) as caught:
        if layout.warns:
            warnings.filterwarnings("always", message=f".*{layout.warns}")
        try:
            reports, state = train_in_memory(recipe(layout, str(folder / "shards")), layout.plan, rank)
        except Exception:
            raise RuntimeError(f"{layout.name}: {traceback.format_exc()}") from None
    warned = [str(each.message) for each in caught or ()]
    result = {"name": layout.name, "warned": warned} | compare(folder, f"bare-{layout.reference}", reports, state)
    (folder / f"brought-{LAYOUTS.index(layout)}-{rank}.json").write_text(json.dumps(result))


def main() -> None:
    rank, processes, port, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4])
    torch.set_num_threads(1)
    selected = [layout for layout in LAYOUTS if layout.name in json.loads(sys.argv[5])]
    worlds = Worlds(rank, processes, port)
    for layout in {layout.reference: layout for layout in selected}.values():
        worlds.within(1, partial(train_reference, layout, folder))
    for layout in selected:
        worlds.within(layout.plan.degrees.world, partial(train_layout, layout, rank, folder))


if __name__ == "__main__":
    main()
