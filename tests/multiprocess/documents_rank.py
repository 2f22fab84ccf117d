"""One rank of the document test: each document alone in a plain loop first, then the selected layouts."""

import json
import sys
import traceback
from functools import partial
from pathlib import Path

import brought
import torch
import torch.nn.functional as F
from deviations import compare, write_reference
from documents_layouts import LAYOUTS, Packed, recipe
from plain_loop import Objective, scores, train_plainly
from torch import Tensor, nn
from training import train_in_memory
from worlds import Worlds

from danlu.framework.init_weights import init_weights
from danlu.framework.transformer import Decoder
from danlu.storage.data.token_shards import ShuffledDataset, TokenShards

END = 256
"""What ends a document of the bytes tokenizer."""


class EachDocumentAlone(Objective):
    """Every document of a row goes through the model by itself; nothing is padded, nothing is masked.

    A row has one token more than it predicts with. Nothing is predicted from the end of a document.
    """

    def count(self, rows: Tensor) -> int:
        return int((rows[:, :-1] != END).sum())

    def loss_sum(self, model: nn.Module, rows: Tensor) -> Tensor:
        total = torch.zeros(())
        for row in rows:
            starts = [0, *(place + 1 for place in range(len(row) - 1) if row[place] == END)]
            for start, stop in zip(starts, [*starts[1:], len(row) - 1], strict=True):
                known, wanted = row[start:stop], row[start + 1 : stop + 1]
                if not len(known):
                    continue
                predicted = known != END
                found = scores(model, known[None])[0]
                total = total + F.cross_entropy(found[predicted], wanted[predicted], reduction="sum")
        return total


def train_reference(packed: Packed, folder: Path) -> None:
    made = recipe(packed, str(folder / "shards"))
    data = ShuffledDataset(TokenShards.open(folder / "shards"), made.batch.length, made.seed)
    if packed.is_brought:
        torch.manual_seed(made.seed)
        model: nn.Module = getattr(brought, packed.model)()
    else:
        model = Decoder(made.decoder)
        init_weights([model], made.decoder, made.seed)
    run = train_plainly(made, model, data, microbatches=8, objective=EachDocumentAlone())
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    write_reference(folder, packed.model, run.losses, run.norms, parameters)
    counts = [
        int((data.read_samples(torch.arange(step * 8, step * 8 + 8).numpy())[:, :-1] != END).sum())
        for step in range(made.steps)
    ]
    (folder / f"{packed.model}-counted.json").write_text(json.dumps(counts))


def train_layout(packed: Packed, rank: int, folder: Path) -> None:
    try:
        reports, state = train_in_memory(recipe(packed, str(folder / "shards")), packed.plan, rank)
        result = {"name": packed.name} | compare(folder, packed.model, reports, state)
    except Exception:
        raise RuntimeError(f"{packed.name}: {traceback.format_exc()}") from None
    result["counted"] = [report.counted for report in reports]
    (folder / f"documents-{LAYOUTS.index(packed)}-{rank}.json").write_text(json.dumps(result))


def main() -> None:
    rank, processes, port, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4])
    torch.set_num_threads(1)
    selected = [packed for packed in LAYOUTS if packed.name in json.loads(sys.argv[5])]
    worlds = Worlds(rank, processes, port)
    for packed in {packed.model: packed for packed in selected}.values():
        worlds.within(1, partial(train_reference, packed, folder))
    for packed in selected:
        worlds.within(packed.plan.degrees.world, partial(train_layout, packed, rank, folder))


if __name__ == "__main__":
    main()
