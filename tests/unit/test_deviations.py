"""Figures that are NaN, infinite or missing are never taken for agreement."""

from math import inf, isnan, nan

import pytest
from deviations import gather, relative, worst

AGREES = {"loss": 1e-7, "norm": 0.0, "parameters": 2e-7, "missing": []}


@pytest.mark.parametrize("deviations", [[0.0, nan], [nan, 0.0], [1.0, nan, 2.0]])
def test_nan_is_the_worst_wherever_it_stands(deviations: list[float]) -> None:
    assert isnan(worst(deviations))
    assert not worst(deviations) <= 1e-5


def test_the_worst_is_the_largest() -> None:
    assert worst([0.5, inf, 0.1]) == inf
    assert worst([0.5, 3.0]) == 3.0
    with pytest.raises(ValueError, match="nothing was compared"):
        worst([])


@pytest.mark.parametrize("found", [[1.0, nan], [1.0, inf], [1.0, 3.0]])
def test_a_figure_that_departs_is_seen(found: list[float]) -> None:
    assert not relative(found, [1.0, 2.0]) <= 1e-5
    assert not relative([1.0, inf], [1.0, inf]) <= 1e-5, "two that overflow do not agree"
    with pytest.raises(ValueError, match="longer"):
        relative([1.0], [1.0, 2.0])


@pytest.mark.parametrize("figure", ["loss", "norm", "parameters"])
def test_one_rank_with_nan_fails_its_layout(figure: str) -> None:
    assert not gather([AGREES, AGREES | {figure: nan}], ranks=2)[figure] <= 1e-5
    assert gather([AGREES, AGREES], ranks=2)[figure] <= 1e-5


def test_a_rank_or_a_parameter_without_a_result_fails_its_layout() -> None:
    with pytest.raises(ValueError, match="2 ranks must have compared, but 1 have"):
        gather([AGREES], ranks=2)
    first, second = AGREES | {"missing": ["embed", "head"]}, AGREES | {"missing": ["head"]}
    with pytest.raises(ValueError, match="no rank compared head"):
        gather([first, second], ranks=2)
