"""Routers that send most tokens to the same experts are told of, once."""

import pytest
from made_loops import MOE, SHAPE, own, recipe

from danlu.framework.collapse_alarm import PATIENCE, CollapseAlarm
from danlu.spec.model import Model


def alarm(experts: int = 8, balance: str = "bias") -> CollapseAlarm:
    moe = MOE.model_copy(update={"experts": experts, "balance": balance})
    return CollapseAlarm(recipe(Model(**SHAPE, moe=moe)))


def told(watch: CollapseAlarm, *loads: float) -> list[int]:
    return [step for step, load in enumerate(loads, 1) if watch.check(load)]


def test_an_uneven_load_is_told_of_once_and_again_after_it_was_even() -> None:
    assert told(alarm(), *[2.1] * (PATIENCE - 1)) == []
    assert told(alarm(), *[2.1] * 3 * PATIENCE) == [PATIENCE]
    assert told(alarm(), *[2.1] * PATIENCE, 1.2, *[4.0] * PATIENCE) == [PATIENCE, 2 * PATIENCE + 1]
    assert told(alarm(), *[2.1] * (PATIENCE - 1), 1.9, *[2.1] * (PATIENCE - 1)) == [], "not in a row"
    assert told(alarm(), *[2.1] * (PATIENCE - 1), float("nan"), 2.1) == [], "a load that is no number is no collapse"


def test_what_is_uneven_depends_on_how_uneven_it_could_be() -> None:
    assert told(alarm(experts=64), *[15.9] * PATIENCE) == []
    assert told(alarm(experts=64), *[16.0] * PATIENCE) == [PATIENCE]
    assert told(alarm(experts=4), *[1.9] * PATIENCE) == [], "half of the worst, which is twice the mean"


@pytest.mark.parametrize(
    ("balance", "remedy"),
    [
        ("loss", "raise `model.moe.balance_rate` (0.02), or set `model.moe.balance` to bias"),
        ("bias", "raise `model.moe.balance_rate` (0.02), or set `model.moe.balance` to exact"),
        ("none", "set `model.moe.balance` to bias or exact"),
    ],
)
def test_the_warning_says_how_uneven_and_what_to_do(balance: str, remedy: str) -> None:
    watch = alarm(balance=balance)
    (said,) = {text for _ in range(PATIENCE) if (text := watch.check(3.26))}
    assert said.endswith(remedy)
    assert "for 100 steps the busiest expert of a layer has had 3.3 × the mean load, of 4.0 × at most" in said


def test_models_without_routers_of_ours_are_not_judged() -> None:
    assert told(CollapseAlarm(recipe(Model(**SHAPE))), *[9.0] * PATIENCE) == []
    assert told(CollapseAlarm(recipe(own("PlainModel"))), *[9.0] * PATIENCE) == []
    assert alarm().check(None) == ""
