"""The page of a plan draws every schedule that the planner can choose."""

import pytest
from made_questions import question

from danlu.planner import search
from danlu.planner.explain import level_costs
from danlu.report.plan_page import plan_page


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zero-bubble", "zbv"])
def test_every_schedule_is_drawn(schedule: str) -> None:
    answer = search(question(chips=8, fix=f"pp=4,schedule={schedule},recompute=none", sequences=32), shown=1)
    page = plan_page(answer, level_costs(answer.best[0]), [], None)
    assert "Not drawn" not in page
    assert 'class="b-F t0"' in page
    halved = schedule in ("zero-bubble", "zbv")
    assert ('class="b-W t0"' in page) is halved
    assert ("1 for inputs and 1 for weights" in page) is halved
    assert "optimiser" not in page
