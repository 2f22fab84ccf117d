"""A batch that grows: sizes by step and by sample agree, and samples keep their order."""

import numpy as np
import pytest
from made_meshes import place_of
from numpy.typing import NDArray

from danlu.dryrun.dry_run import RAMP_NOTE, dry_run_ranks
from danlu.framework.batch_loader import BatchLoader
from danlu.framework.optimizer import learning_rate
from danlu.spec.load import load_model
from danlu.spec.plan import Degrees, Plan
from danlu.spec.recipe import BatchConfig, BatchRampStage, DataConfig, LRSchedule, OptimizerConfig, Recipe

RAMP = (
    BatchRampStage(until=3, sequences=2),
    BatchRampStage(until=4, sequences=4),
    BatchRampStage(until=9, sequences=6),
)
BATCH = BatchConfig(sequences=8, length=4, ramp=RAMP)
SIZES = [2, 2, 2, 4, 6, 6, 6, 6, 6, 8, 8, 8]


def test_sizes_by_step_are_those_by_sample() -> None:
    cursor, found = 0, []
    for step in range(len(SIZES)):
        assert BATCH.cursor_after(step) == cursor
        found.append(BATCH.sequences_at(cursor))
        cursor += found[-1]
    assert found == SIZES
    starts = [sum(SIZES[:step]) for step in range(len(SIZES))]
    assert [BATCH.cursor_after(3, start) for start in starts[:9]] == [sum(SIZES[: step + 3]) for step in range(9)]
    assert BATCH.cursor_after(2, 7) == 7 + 4 + 6, "a batch that begins in a stage has its size"
    plain = BatchConfig(sequences=8, length=4)
    assert [plain.sequences_at(cursor) for cursor in (0, 8, 800)] == [8, 8, 8]
    assert plain.cursor_after(100) == 800


class Numbers:
    """Samples that hold their own number."""

    def read_samples(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.repeat(indices[:, None], 5, axis=1)


@pytest.mark.parametrize("prefetch", [0, 2])
def test_every_sample_is_read_once_and_in_order(prefetch: int) -> None:
    """Over both ranks together, also by a loader that begins in the middle of the ramp."""
    ranks = [BatchLoader(Numbers(), BATCH, 1000, place_of(rank, shard=2), prefetch) for rank in range(2)]
    late = BatchLoader(Numbers(), BATCH, 1000, place_of(0, shard=2), prefetch)
    cursor = 0
    for step, size in enumerate(SIZES):
        batches = [loader.at(cursor).tokens[:, 0].tolist() for loader in ranks]
        assert sorted(number for rows in batches for number in rows) == list(range(cursor, cursor + size))
        if step >= 5:
            assert late.at(cursor).tokens[:, 0].tolist() == batches[0]
        cursor += size


def test_a_decay_at_the_end_has_its_shape() -> None:
    def rate(step: int, shape: str) -> float:
        schedule = LRSchedule(kind="wsd", decay=40, final=0.2, shape=shape)  # type: ignore[arg-type]
        return learning_rate(step, 100, OptimizerConfig(learning_rate=1.0), schedule)

    assert [rate(60, shape) for shape in ("linear", "cosine", "1-sqrt")] == [1.0, 1.0, 1.0]
    assert rate(70, "1-sqrt") == pytest.approx(0.2 + 0.8 * 0.5), "half of it in the first quarter"
    assert rate(80, "cosine") == pytest.approx(0.6)
    assert rate(70, "cosine") == pytest.approx(0.2 + 0.8 * (1 + 2**-0.5) / 2)
    assert all(rate(100, shape) == pytest.approx(0.2) for shape in ("linear", "cosine", "1-sqrt"))


def test_a_dry_run_and_a_plan_are_about_the_full_batch() -> None:
    made = Recipe(
        name="ramp",
        steps=10,
        model=load_model("tiny-llama").model_copy(update={"layers": 1}),
        data=DataConfig(shards="none"),
        batch=BatchConfig(sequences=8, length=16, ramp=(BatchRampStage(until=3, sequences=2),)),
    )
    full = made.model_copy(update={"batch": BatchConfig(sequences=8, length=16)})
    ramped, plain = (dry_run_ranks(each, Plan(degrees=Degrees(shard=2)), None, [0]) for each in (made, full))
    assert (ramped.notes, plain.notes) == ((RAMP_NOTE,), ())
    assert ramped.traces[0].flops == plain.traces[0].flops
    assert ramped.traces[0].peak == plain.traces[0].peak
