"""How much memory a plan keeps free, and its chance to fit, come from published runs whose memory was measured."""

from dataclasses import replace

import pytest
from made_questions import machine, question

from danlu.planner import search
from danlu.planner.fit_chance import default_reserve, fit_chance
from danlu.planner.residuals import memory_residuals
from danlu.report.plan_confidence import fit_chance_text


def test_what_is_kept_free_holds_95_of_100_published_runs() -> None:
    rows = memory_residuals()
    assert len(rows) > 50 and not any(row.set.startswith("fit-") for row in rows)
    usable = 1 - default_reserve()
    held = sum(row.measured / row.predicted * usable <= 1 for row in rows) / len(rows)
    assert held == pytest.approx(0.95, abs=1 / len(rows))
    assert question().reserve == default_reserve() > 0.05


def test_a_chance_is_the_share_of_runs_that_would_have_fit() -> None:
    ratios = sorted(row.ratio for row in memory_residuals())
    middle = ratios[len(ratios) // 2]
    assert fit_chance(80e9 / middle * 0.9999, 80e9) == (len(ratios) // 2 + 1) / len(ratios)
    assert fit_chance(80e9 / ratios[-1] * 0.9999, 80e9) == 1.0
    assert fit_chance(80e9 / ratios[0] * 1.0001, 80e9) == 0.0


def test_more_free_memory_is_a_better_chance_and_an_explicit_reserve_wins() -> None:
    roomy = question(chips=8, cluster=machine(nodes=2), without="pp", fix="recompute=none")
    memory = round(1.02 * search(roomy, shown=1).best[0].peak_bytes)  # all but 2 % of it for the fastest
    asked = replace(roomy, cluster=machine(nodes=2, memory=memory))
    careful, bold = search(asked, shown=1).best[0], search(replace(asked, reserve=0.0), shown=1).best[0]
    assert careful.fit_chance >= 0.94 > bold.fit_chance
    assert careful.peak_bytes <= (1 - default_reserve()) * memory < bold.peak_bytes <= memory
    assert bold.seconds < careful.seconds


def test_a_plan_that_takes_all_it_may_has_the_chance_that_the_reserve_is_for() -> None:
    roomy = question(chips=8, cluster=machine(nodes=2), without="pp", fix="recompute=none")
    peak = search(roomy, shown=1).best[0].peak_bytes
    tight = replace(roomy, cluster=machine(nodes=2, memory=1.0001 * peak / (1 - default_reserve())))
    fullest = search(tight, shown=1).best[0]
    assert fullest.peak_bytes > 0.999 * tight.usable_memory
    assert fullest.fit_chance >= 0.94 > fit_chance(fullest.peak_bytes, tight.usable_memory)


def test_no_chance_is_told_as_certain() -> None:
    assert fit_chance_text(0.953) == "95 %"
    assert fit_chance_text(1.0) == ">98 %" and fit_chance_text(0.0) == "<2 %"  # of fewer than a hundred runs
    assert len(memory_residuals()) in range(50, 99)
