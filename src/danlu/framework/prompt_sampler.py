"""Text that a run generates between two steps, on its own layout: no rank has to hold the full model."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from danlu.comm.mesh import ParallelMesh
from danlu.framework.forward_only import ForwardOnly, microbatch_rows
from danlu.framework.text_generation import TextCodec
from danlu.parallel.batch import Batch
from danlu.parallel.sequence_shard import sequence_shard
from danlu.spec.recipe import Recipe
from danlu.spec.samples import Sample, SampleEnd
from danlu.storage.data.text_stream import TextStream
from danlu.storage.data.tokenizer import open_tokenizer

_NOT_FINITE = -1


@dataclass
class _Continuation:
    """A prompt and what has been drawn for it."""

    prompt: str
    ids: list[int]
    limit: int
    """Most tokens to draw."""
    ended: SampleEnd | None = None

    def __post_init__(self) -> None:
        self.drawn: list[int] = []

    def add(self, token: int, end_of_text: int) -> None:
        if token == _NOT_FINITE:
            self.ended = "not finite"
        elif token == end_of_text:
            self.ended = "end of text"
        else:
            self.drawn.append(token)


class PromptSampler:
    """Continues the recipe's prompts with the most likely tokens. All ranks create one, and call it, together.

    There is no cache: every token takes a forward pass over sequences of the training's length, as evaluation does.
    """

    def __init__(self, recipe: Recipe, mesh: ParallelMesh, end_of_text: int) -> None:
        """`end_of_text` is the token that ends a document of the run's data."""
        tokenizer = open_tokenizer(recipe.data.tokenizer)
        self._codec = TextCodec(tokenizer=tokenizer, end_of_text=end_of_text, context=recipe.batch.length)
        self._prompts, self._tokens = recipe.evaluation.prompts, recipe.evaluation.sample_tokens
        self._vocabulary, self._mesh = recipe.model.vocabulary, mesh
        self._document_mask = recipe.data.document_mask
        self._rows = microbatch_rows(recipe, mesh)
        self._shard = sequence_shard(mesh)

    def run(self, forward: ForwardOnly) -> list[Sample]:
        """A sample of every prompt, the same on all ranks; the modules are in evaluation mode."""
        together = self._rows * self._mesh.plan.degrees.dp
        drawn: list[Sample] = []
        for first in range(0, len(self._prompts), together):
            drawn += self._continue(self._prompts[first : first + together], forward)
        return drawn

    def _continue(self, prompts: Sequence[str], forward: ForwardOnly) -> Iterator[Sample]:
        """Draw for as many prompts as all ranks take at once."""
        growing = [self._begin(prompt) for prompt in prompts]
        while any(each.ended is None for each in growing):
            tokens = self._most_likely([each.ids + each.drawn for each in growing], forward)
            for each, token in zip(growing, tokens, strict=True):
                if each.ended is not None:
                    continue
                each.add(token, self._codec.end_of_text)
                if each.ended is None and len(each.drawn) == each.limit:
                    each.ended = "tokens" if each.limit == self._tokens else "context"
        for each in growing:
            stream = TextStream(self._codec.tokenizer, each.ids)
            text = "".join(map(stream.add, each.drawn)) + stream.end()
            assert each.ended is not None
            yield Sample(prompt=each.prompt, text=text, tokens=len(each.drawn), ended=each.ended)

    def _begin(self, prompt: str) -> _Continuation:
        ids = self._codec.encode(prompt)
        return _Continuation(prompt, ids, min(self._tokens, self._codec.context - len(ids)))

    def _most_likely(self, sequences: Sequence[list[int]], forward: ForwardOnly) -> list[int]:
        """The most likely next token of every sequence, or `_NOT_FINITE`."""
        first = self._mesh.dp_rank * self._rows
        mine = sequences[first : first + self._rows]
        rows_BS = torch.zeros(self._rows, self._codec.context, dtype=torch.int64)  # what follows a token is not seen
        for row_S, sequence in zip(rows_BS, mine, strict=False):
            row_S[: len(sequence)] = torch.tensor(sequence)
        positions_BS = torch.arange(self._codec.context).expand_as(rows_BS).contiguous()
        tokens_BS = self._shard.take(rows_BS).contiguous().to(self._mesh.device)
        positions = positions_BS.to(self._mesh.device) if self._document_mask else None

        # One more than the token, so that ranks without a sequence's last position can add nothing.
        chosen_P = torch.zeros(len(sequences), dtype=torch.int64, device=self._mesh.device)
        ends = [len(sequence) - 1 for sequence in mine]
        for chosen in forward([Batch(tokens_BS, tokens_BS, positions)], lambda logits, _: self._choose(logits, ends)):
            chosen_P[first : first + len(mine)] = chosen
        self._mesh.world.all_reduce(chosen_P)
        return [int(token) - 1 for token in chosen_P.tolist()]

    def _choose(self, logits_BSV: Tensor, ends: Sequence[int]) -> Tensor:
        """One more than the most likely token after these positions; 0 on ranks that add nothing, or if none is."""
        last_B = torch.tensor(ends, dtype=torch.int64, device=logits_BSV.device)
        held_BS = self._shard.positions(logits_BSV.shape[1], logits_BSV.device) == last_B[:, None]
        logits_BV = logits_BSV[torch.arange(len(ends), device=logits_BSV.device), held_BS.int().argmax(1)].float()
        group = None if logits_BSV.shape[-1] == self._vocabulary else self._mesh.group("tp")
        before = 0 if group is None else group.rank() * logits_BSV.shape[-1]
        finite_B = logits_BV.isfinite().all(1)
        logits_BV[:, max(0, self._codec.tokenizer.vocabulary - before) :] = -torch.inf  # no token of the tokenizer
        top_B, token_B = logits_BV.max(1)
        best_3B = torch.stack((top_B, token_B + before, finite_B))
        if group is not None:
            shards = [torch.empty_like(best_3B) for _ in range(group.size())]
            dist.all_gather(shards, best_3B, group=group)
            shards_T3B = torch.stack(shards)
            best_3B = shards_T3B[shards_T3B[:, 0].argmax(0), :, torch.arange(len(ends))].T
            best_3B[2] = shards_T3B[:, 2].amin(0)
        counts = held_BS.any(1) & best_3B[2].bool() & (self._mesh.coordinate("tp") == 0)
        return torch.where(counts, best_3B[1].long() + 1, 0)
