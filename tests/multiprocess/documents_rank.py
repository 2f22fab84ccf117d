"""One rank of the document test: each document alone in a plain loop first, then the selected layouts."""

import json
import sys
import traceback
from functools import partial
from pathlib import Path

import brought
import numpy as np
import torch
import torch.nn.functional as F
from chat_data import ASSISTANT, END
from deviations import compare, write_reference
from documents_layouts import LAYOUTS, Packed, recipe
from plain_loop import Objective, scores, train_plainly
from torch import Tensor, nn
from training import train_in_memory
from worlds import Worlds

from danlu.comm.mesh import build_mesh
from danlu.comm.world import World
from danlu.framework.decoder.decoder import Decoder
from danlu.framework.decoder.init_weights import init_weights
from danlu.framework.evaluation import Evaluation
from danlu.framework.state import TrainState
from danlu.spec.event import EvaluationEvent
from danlu.spec.recipe import EvaluationConfig, EvaluationSource, has_experts
from danlu.storage.data.token_shards import ShuffledDataset, TokenShards

END_OF_TEXT = 256
"""What ends a document of the bytes tokenizer."""
HELD_OUT = 11
"""Samples of an evaluation."""


class EachDocumentAlone(Objective):
    """Every document of a row goes through the model by itself; nothing is padded, nothing is masked.

    A row has one token more than it predicts with. Which tokens end a document and which of them are learned is found
    in the whole stream of tokens, by ids alone.
    """

    def __init__(self, ends: Tensor, learned: Tensor, whole_rows: bool) -> None:
        """By rows of a step, as `Stream` gives them; `whole_rows` are not taken apart."""
        self.ends, self.learned, self.whole_rows = ends, learned, whole_rows

    def count(self, rows: Tensor) -> int:
        counted = self.learned[:, 1:] if self.whole_rows else self.learned[:, 1:] & ~self.ends[:, :-1]
        return int(counted.sum())

    def loss_sum(self, model: nn.Module, rows: Tensor) -> Tensor:
        total = torch.zeros(())
        for row, ends, learned in zip(rows, self.ends, self.learned, strict=True):
            last = len(row) - 1
            borders = [] if self.whole_rows else [place + 1 for place in range(last - 1) if ends[place]]
            for start, stop in zip([0, *borders], [*borders, last], strict=True):
                predicted = learned[start + 1 : stop + 1].clone()
                if not self.whole_rows and ends[stop - 1]:
                    predicted[-1] = False  # what comes next is another document
                found = scores(model, row[None, start:stop])[0]
                wanted = row[start + 1 : stop + 1]
                total = total + F.cross_entropy(found[predicted], wanted[predicted], reduction="sum")
        return total


class Stream:
    """All tokens of a data set in order, and what their ids say: read once, without the marks of the data set."""

    def __init__(self, folder: Path, packed: Packed, length: int, seed: int) -> None:
        shards = TokenShards.open(folder / packed.shards)
        self.data, self.length = ShuffledDataset(shards, length, seed), length
        self.tokens = torch.from_numpy(shards.read(0, shards.tokens))
        self.learned = torch.ones(len(self.tokens), dtype=torch.bool)
        self.ends = self.tokens == END_OF_TEXT
        if packed.chat:
            self._find_answers(folder)

    def _find_answers(self, folder: Path) -> None:
        """Answers are between two special tokens; the last of a conversation, whose length is in its line, ends it."""
        added = json.loads((folder / "tokenizer" / "tokenizer.json").read_text())["added_tokens"]
        ids = {token["content"]: token["id"] for token in added}
        turns = [len(json.loads(line)["messages"]) // 2 for line in (folder / "talks.jsonl").read_text().splitlines()]
        last = torch.tensor([number == each for each in turns for number in range(1, each + 1)])
        answers_end = self.tokens == ids[END]
        self.ends = answers_end.masked_scatter(answers_end, last)
        speaking = False
        for place, token in enumerate(self.tokens.tolist()):
            self.learned[place] = speaking
            speaking = (speaking or token == ids[ASSISTANT]) and token != ids[END]

    def rows(self, first: int, number: int) -> tuple[Tensor, Tensor]:
        """What ends a document and what is learned in some samples."""
        _, ends, learned = self._rows_of(self.data.sample_ids(np.arange(first, first + number)).tolist())
        return ends, learned

    def held_out(self) -> tuple[Tensor, Tensor, Tensor]:
        """The same with their tokens of samples spread evenly over the data set."""
        available = (len(self.tokens) - 1) // self.length
        return self._rows_of([number * available // HELD_OUT for number in range(HELD_OUT)])

    def _rows_of(self, samples: list[int]) -> tuple[Tensor, Tensor, Tensor]:
        spans = [slice(sample * self.length, (sample + 1) * self.length + 1) for sample in samples]
        every = (self.tokens, self.ends, self.learned)
        tokens, ends, learned = (torch.stack([each[span] for span in spans]) for each in every)
        return tokens, ends, learned


def train_reference(packed: Packed, folder: Path) -> None:
    made = recipe(packed, folder)
    stream = Stream(folder, packed, made.batch.length, made.seed)
    if packed.is_brought:
        torch.manual_seed(made.seed)
        model: nn.Module = getattr(brought, packed.model)()
    else:
        model = Decoder(made.decoder)
        init_weights([model], made.decoder, made.seed)
    counted: list[int] = []

    def objective(first: int) -> Objective:
        found = EachDocumentAlone(*stream.rows(first, made.batch.sequences), whole_rows=not packed.document_mask)
        counted.append(found.count(found.ends))
        return found

    run = train_plainly(made, model, stream.data, objective=objective)
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    write_reference(folder, packed.reference, run.losses, run.norms, parameters)
    with torch.no_grad():
        tokens, ends, learned = stream.held_out()
        aim = EachDocumentAlone(ends, learned, whole_rows=not packed.document_mask)
        held_out = aim.loss_sum(model.eval(), tokens).item() / aim.count(tokens)
    told = {"counted": counted, "held-out": held_out, "held-out counted": aim.count(tokens)}
    (folder / f"{packed.reference}-told.json").write_text(json.dumps(told))


def evaluate(packed: Packed, state: TrainState, folder: Path) -> EvaluationEvent:
    """The held-out loss of a trained model, as a run computes it."""
    made = recipe(packed, folder)
    source = EvaluationSource(name="held-out", shards=str(folder / packed.shards))
    evaluation = EvaluationConfig(data=(source,), tokens=HELD_OUT * made.batch.length)
    made = made.model_copy(update={"evaluation": evaluation})
    mesh = build_mesh(packed.plan, World.adopt(), None, experts=has_experts(made.model))
    return Evaluation(made, mesh, state, on_warning=print).run(made.steps)


def train_layout(packed: Packed, rank: int, folder: Path) -> None:
    try:
        reports, state = train_in_memory(recipe(packed, folder), packed.plan, rank)
        result = {"name": packed.name} | compare(folder, packed.reference, reports, state)
    except Exception:
        raise RuntimeError(f"{packed.name}: {traceback.format_exc()}") from None
    evaluated = evaluate(packed, state, folder)
    result["counted"] = [report.counted for report in reports]
    result["held-out"], result["held-out counted"] = evaluated.losses["held-out"], evaluated.tokens["held-out"]
    (folder / f"documents-{LAYOUTS.index(packed)}-{rank}.json").write_text(json.dumps(result))


def main() -> None:
    rank, processes, port, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4])
    torch.set_num_threads(1)
    selected = [packed for packed in LAYOUTS if packed.name in json.loads(sys.argv[5])]
    worlds = Worlds(rank, processes, port)
    for packed in {packed.reference: packed for packed in selected}.values():
        worlds.within(1, partial(train_reference, packed, folder))
    for packed in selected:
        worlds.within(packed.plan.degrees.world, partial(train_layout, packed, rank, folder))


if __name__ == "__main__":
    main()
