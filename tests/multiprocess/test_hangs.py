"""Real ranks that hang: who is blamed, for what, and how soon."""

import pytest
from hangs import CAUSES, GRACE_SECONDS, Found, HangingRanks

pytestmark = pytest.mark.timeout(900)
WORLD = 4


@pytest.fixture(scope="module")
def hangs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Found]:
    """One hang of every cause, between clean steps."""
    ranks = HangingRanks(tmp_path_factory.mktemp("hangs"), WORLD)
    found = {}
    with ranks.running(seconds=720):
        ranks.run_clean(steps=60)
        for number, cause in enumerate(CAUSES):
            found[cause] = ranks.hang(cause, rank=number % WORLD)
            ranks.run_clean(steps=30)
    assert ranks.false_alarms == 0
    return found


@pytest.mark.parametrize("cause", CAUSES)
def test_the_rank_that_is_waited_for_is_named_with_the_cause(cause: str, hangs: dict[str, Found]) -> None:
    found = hangs[cause]
    assert found.right, found
    assert found.diagnosis is not None
    assert found.diagnosis.collective is not None
    assert found.rank not in found.diagnosis.waiting


@pytest.mark.parametrize("cause", CAUSES)
def test_it_is_found_by_the_run_s_own_pace(cause: str, hangs: dict[str, Found]) -> None:
    """Not by the time-out of a collective, which is ten minutes."""
    assert hangs[cause].seconds < hangs[cause].deadline + GRACE_SECONDS
