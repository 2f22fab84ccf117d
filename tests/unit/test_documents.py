"""Packed documents: where they begin, what counts, what attention may see, and which custom modules keep them apart."""

import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import brought
import numpy as np
import pytest
import torch
from made_meshes import place_of
from numpy.typing import NDArray
from torch import Tensor, nn

import danlu.framework.batch_loader
from danlu.dryrun.dry_run import dry_run_rank
from danlu.framework.batch_loader import BatchLoader, document_positions
from danlu.framework.custom.construct import CustomModelError
from danlu.framework.custom.documents import check_block_comparison, check_document_support, verify_documents
from danlu.framework.decoder.attention import Documents
from danlu.framework.decoder.rope import apply_rope
from danlu.parallel.batch import IGNORE_INDEX
from danlu.parallel.loss import cross_entropy_sum
from danlu.spec.custom_model import CustomModel
from danlu.spec.plan import Degrees, Plan
from danlu.spec.recipe import BatchConfig, DataConfig, Recipe
from danlu.storage.data.token_marks import pack_marks, unpack_marks

BATCH = BatchConfig(sequences=2, length=6)
END = 9
ROWS = np.array([[1, END, 2, 3, 4, END, 5], [END, 6, 7, 8, END, 1, 2]])
POSITIONS = [[0, 1, 0, 1, 2, 3], [0, 0, 1, 2, 3, 0]]
TARGETS = [[END, None, 3, 4, END, None], [None, 7, 8, END, None, 2]]
"""None where the next document begins."""


class TwoRows:
    """Two samples of short documents, again and again."""

    def read_samples(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        return ROWS[indices % 2]

    def read_words(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        rows = self.read_samples(indices)
        return pack_marks(rows, rows == END)


def targets() -> Tensor:
    return torch.tensor([[IGNORE_INDEX if token is None else token for token in row] for row in TARGETS])


def test_marks_are_what_was_packed() -> None:
    tokens = np.arange(12).reshape(2, 6) * 2**25
    ends, counted = tokens % 3 == 0, tokens % 5 == 0
    found = unpack_marks(pack_marks(tokens, ends, counted))
    assert all((a == b).all() for a, b in zip(found, (tokens, ends, counted), strict=True))


def test_positions_begin_again_after_every_end_and_in_every_row() -> None:
    assert document_positions(ROWS[:, :-1] == END).tolist() == POSITIONS


def test_a_batch_says_where_documents_begin_and_counts_no_token_across_a_border() -> None:
    batch = BatchLoader(TwoRows(), BATCH, 10, place_of(0), document_mask=True).at(0)
    assert torch.equal(batch.tokens, torch.from_numpy(ROWS[:, :-1]))
    assert torch.equal(batch.targets, targets())
    assert batch.positions is not None and batch.positions.tolist() == POSITIONS
    assert batch.counted == 8 and batch.model_inputs.keys() == {"positions"}


def test_without_a_mask_a_batch_is_as_ever() -> None:
    batch = BatchLoader(TwoRows(), BATCH, 10, place_of(0)).at(0)
    assert torch.equal(batch.targets, torch.from_numpy(ROWS[:, 1:]))
    assert batch.positions is None and batch.counted is None and not batch.model_inputs


def test_context_ranks_share_tokens_and_know_all_positions() -> None:
    parts = [BatchLoader(TwoRows(), BATCH, 10, place_of(rank, cp=3), document_mask=True).at(0) for rank in range(3)]
    assert torch.equal(torch.cat([part.targets for part in parts], dim=1), targets())
    assert all(part.positions is not None and part.positions.tolist() == POSITIONS for part in parts)
    assert [part.counted for part in parts] == [2, 4, 2]


def test_a_source_without_marks_is_refused() -> None:
    class Plain:
        def read_samples(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
            return ROWS[indices]

    with pytest.raises(TypeError, match="Plain has no `read_words`"):
        BatchLoader(Plain(), BATCH, 10, place_of(0), document_mask=True)


def test_attention_sees_the_earlier_tokens_of_its_document() -> None:
    positions = torch.tensor(POSITIONS)
    mask = Documents.from_positions(positions).with_mask(torch.bfloat16).mask_B1SS
    assert mask.shape == (2, 1, 6, 6) and mask.dtype == torch.bfloat16
    document = (positions == 0).cumsum(1)
    for row in range(2):
        for query in range(6):
            for key in range(6):
                visible = key <= query and document[row, key] == document[row, query]
                assert mask[row, 0, query, key] == (0.0 if visible else -torch.inf)


def test_a_document_is_rotated_as_if_it_were_alone() -> None:
    x_BSHW = torch.randn(1, 12, 2, 8, generator=torch.Generator().manual_seed(0))
    positions = torch.tensor([[*range(5), *range(7)]])
    together = apply_rope(x_BSHW, 10_000.0, None, positions)
    alone = torch.cat([apply_rope(part, 10_000.0) for part in x_BSHW.split([5, 7], dim=1)], dim=1)
    assert torch.equal(together, alone)


def test_what_is_ignored_adds_no_loss_and_no_gradient() -> None:
    logits = torch.randn(2, 6, 10, generator=torch.Generator().manual_seed(0), requires_grad=True)
    found = cross_entropy_sum(logits, targets(), None)
    probabilities = logits.detach().log_softmax(-1)
    pairs = [(r, c, t) for r, row in enumerate(TARGETS) for c, t in enumerate(row) if t is not None]
    assert found.item() == pytest.approx(-sum(float(probabilities[pair]) for pair in pairs), rel=1e-6)
    found.backward()
    assert logits.grad is not None
    assert torch.equal(logits.grad.abs().sum(-1) > 0, targets() != IGNORE_INDEX)


class Deaf(brought.PlainModel):
    """Takes positions, and does nothing about attention."""

    def forward(self, tokens: Tensor, position_ids: Tensor | None = None) -> Tensor:
        places = torch.arange(tokens.shape[1]) if position_ids is None else position_ids
        x = self.token(tokens) + self.place(places)
        for layer in self.layers:
            x = layer(x, self.depth_scale * 2)
        return self.score(self.norm(x))


def test_a_rank_with_one_document_is_not_waited_for() -> None:
    """Of compiled blocks with experts: another rank has a mask, and would compare its block with eager code alone."""
    together = {"degrees": {"shard": 2, "ep": 2}, "compile": True}
    with pytest.raises(CustomModelError, match="`check_compiled = false` in the plan"):
        check_block_comparison(Plan.model_validate(together))
    check_block_comparison(Plan.model_validate(together | {"check_compiled": False}))
    check_block_comparison(Plan.model_validate({"degrees": {"shard": 2}, "compile": True}))


def test_a_module_that_cannot_be_told_is_refused() -> None:
    with pytest.raises(CustomModelError, match="forward of PlainModel takes no `position_ids`"):
        check_document_support(brought.PlainModel())


def test_a_module_that_lets_documents_see_each_other_is_refused() -> None:
    torch.manual_seed(0)
    check_document_support(module := Deaf())
    with pytest.raises(CustomModelError, match="gives a document other logits than alone"):
        verify_documents(module, brought.VOCABULARY)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_transformers_keep_documents_apart(attention: str) -> None:
    torch.manual_seed(0)
    module = brought.llama(attn_implementation=attention, use_cache=False)
    check_document_support(module)
    verify_documents(module, brought.VOCABULARY)


def test_an_attention_that_packs_single_rows_only_is_refused() -> None:
    module = brought.llama()
    module.config = SimpleNamespace(_attn_implementation="flash_attention_2")  # type: ignore[assignment]
    with pytest.raises(CustomModelError, match='"flash_attention_2", which would see other documents'):
        check_document_support(module)


def test_a_custom_module_with_documents_is_dry_run() -> None:
    folder = str(Path(brought.__file__).parent)
    recipe = Recipe(
        name="dry",
        steps=1,
        model=CustomModel(factory="brought:llama", path=folder, vocabulary=brought.VOCABULARY),
        data=DataConfig(shards="none", document_mask=True),
        batch=BatchConfig(sequences=4, length=16),
    )
    plan = Plan(degrees=Degrees(pp=2, shard=2), microbatches=2)
    operations = [call.operation for call in dry_run_rank(recipe, plan, None, 3).collectives]
    assert operations.count("all_reduce") >= 1


class Slow(TwoRows):
    """Takes a while to read."""

    def read_samples(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        time.sleep(0.2)
        return super().read_samples(indices)


def test_the_next_batch_is_read_and_moved_while_the_step_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[str] = []

    def move(tensor: Tensor, device: torch.device) -> Any:
        threads.append(threading.current_thread().name)
        return tensor.to(device)

    monkeypatch.setattr(danlu.framework.batch_loader, "copy_to_device", move)
    loader = BatchLoader(Slow(), BATCH, 10, place_of(0))
    loader.at(0)
    time.sleep(0.6)  # a step
    before = time.perf_counter()
    loader.at(2)
    assert time.perf_counter() - before < 0.1, "the step waited for data that it could have had"
    assert {"batch 2", "batch 4"} <= set(threads)


def test_a_module_of_ours_is_no_module_of_theirs() -> None:
    """`positions` is the name in our decoder, `position_ids` in theirs: one is not taken for the other."""
    with pytest.raises(CustomModelError):
        check_document_support(nn.Linear(2, 2))
