"""A loss that is not finite on one rank alone: all ranks leave the step out, and all give up together."""

import json
from pathlib import Path

from ranks import run_ranks

from danlu.framework.step_guard import MAX_SKIPPED_STEPS

RANK = Path(__file__).parent / "nonfinite_rank.py"


def test_ranks_skip_and_give_up_together(tmp_path: Path) -> None:
    run_ranks(RANK, 2, str(tmp_path), seconds=360)
    found = [json.loads((tmp_path / f"nonfinite-{rank}.json").read_text()) for rank in range(2)]
    assert [each["own loss finite"][2] for each in found] == [True, False], "rank 1 alone saw it in the third step"
    assert [each["own loss finite"][6] for each in found] == [False, True], "rank 0 alone in the seventh"
    for each in found:
        assert each["committed"] == [True, True, False, True, True, True, *[False] * MAX_SKIPPED_STEPS]
        digests = each["digests"]
        assert digests[2] == digests[3], "what this rank holds of weights and optimizer did not change"
        assert len(set(digests[:7])) == 6, "and did in every other step"
        assert set(digests[7:]) == {digests[6]}
        assert each["cursor"] == 8 * (6 + MAX_SKIPPED_STEPS)
        assert f"not for {MAX_SKIPPED_STEPS} steps up to step {6 + MAX_SKIPPED_STEPS}" in each["ended"]
