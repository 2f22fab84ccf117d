"""Whether a resumed run goes on with the very next sample, reckoned from its events."""

import numpy as np
from made_runs import started, step

from danlu.framework.sample_continuity import SampleContinuity, check_sample_continuity
from danlu.storage.data.shuffle import IntArray, shuffled_indices

TEN_SAMPLES_A_STEP = [started(), *(step(number) for number in range(1, 8))]


SAMPLES = 37


def which(indices: IntArray) -> list[tuple[int, int]]:
    """Epoch and number."""
    return list(zip((indices // SAMPLES).tolist(), shuffled_indices(indices, SAMPLES, 3).tolist(), strict=True))


def found(history: list, cursor: int, *, at: int = 5, length: int = 100) -> SampleContinuity | None:
    return check_sample_continuity(history, at, cursor, length, which)


def test_a_cursor_that_fits_its_history() -> None:
    assert found(TEN_SAMPLES_A_STEP, 50) == SampleContinuity(0, 0)


def test_a_cursor_behind_or_ahead_of_its_history() -> None:
    assert found(TEN_SAMPLES_A_STEP, 42) == SampleContinuity(repeated=8, skipped=0)
    assert found(TEN_SAMPLES_A_STEP, 53) == SampleContinuity(repeated=0, skipped=3)


def test_another_length_shows_itself() -> None:
    assert found(TEN_SAMPLES_A_STEP, 50, length=50) == SampleContinuity(repeated=50, skipped=0)


def test_a_batch_that_changed_on_the_way_is_reckoned_with() -> None:
    history = [started(), *(step(n) for n in (1, 2, 3)), started(step=3), step(4, tokens=2000), step(5, tokens=2000)]
    assert found(history, 70) == SampleContinuity(0, 0)


def test_steps_that_a_restart_took_again_count_once_as_taken_last() -> None:
    history = [started(), *(step(n, tokens=500) for n in range(1, 5)), started(step=2), *(step(n) for n in (3, 4, 5))]
    assert found(history, 2 * 5 + 3 * 10) == SampleContinuity(0, 0)


def test_a_history_with_a_gap_claims_nothing() -> None:
    assert found([started(), step(1), step(3), step(4), step(5)], 50) is None
    assert found([], 50) is None


def test_an_order_that_is_none_is_caught() -> None:
    history = TEN_SAMPLES_A_STEP
    assert check_sample_continuity(
        history, 5, 50, 100, lambda indices: np.unique(indices % 4).tolist()
    ) == SampleContinuity(4, 0)
