"""What the planner refuses says which rule refuses it, in the words of `danlu check`, and what would do."""

from pathlib import Path

import pytest
from made_questions import DENSE, EXPERTS, machine, question
from typer.testing import CliRunner

from danlu.cli.app import app
from danlu.planner import PlanRequest, PlanRequestError, parse_constraints, search
from danlu.planner.search_space import SearchSpace

ASKED = ["plan", "recipes/llama3-70b.toml", "--cluster", "h100-pod", "--chips", "64"]


def _said(*arguments: str) -> str:
    result = CliRunner().invoke(app, [*ASKED, *arguments])
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    return result.stderr


def test_a_degree_that_the_model_refuses_is_refused_as_check_does(tmp_path: Path) -> None:
    plan = tmp_path / "plan.toml"
    plan.write_text("[degrees]\ntp = 16\nshard = 4\n")
    checked = CliRunner().invoke(app, ["check", ASKED[1], "--plan", str(plan)])
    assert checked.exit_code == 2
    rule = "is 16, but must divide `model.kv_heads` (8)"
    assert rule in checked.stderr
    for words in (_said("--fix", "tp=16"), _said("--why-not", "tp=16", "--fix", "pp=8,cp=1")):
        assert f"`degrees.tp` {rule}: tp = 8" in words
    assert "`degrees.tp` is 3, but must divide `model.kv_heads` (8)" in _said("--why-not", "tp=3")
    assert "--why-not tp=3" in _said("--why-not", "tp=3")


@pytest.mark.parametrize(
    ("fix", "said"),
    [
        ("tp", "--fix: tp has no value: write tp=N"),
        ("schedule=", "write schedule=1f1b or interleaved"),
        ("schedule=zb", "did you mean `zbv`?"),
        ("tp=eight", "tp=eight: must be an integer of 1 or more"),
        ("tp=0", "tp=0: must be an integer of 1 or more"),
        ("pp=3", "pp = 3 does not divide the 64 chips"),
        ("pp=96", "the model has only 80 layers"),
        ("ep=2", "has no expert layers"),
        ("tp=8,pp=16", "pp 16 × tp 8 = 128 does not divide the 64 chips"),
    ],
)
def test_every_knob_says_why(fix: str, said: str) -> None:
    assert said in _said("--fix", fix)


def test_an_empty_space_always_has_a_reason() -> None:
    """Whatever is held, where the list of layouts is empty the answer is a rule or a number of chips, never silence."""
    from danlu.planner.infeasible import explain_infeasible

    empty = 0
    for model, sequences in ((DENSE, 16), (EXPERTS, 12)):
        for fix in ("", "tp=4", "cp=2", "pp=2,tp=2,cp=1", "pp=1,cp=1,tp=1", "ep=4", "ep=3", "tp=8|16", "shard=5"):
            for chips in (3, 5, 7, 8):
                asked = question(model, machine(nodes=8, per_node=1), chips, fix=fix, sequences=sequences)
                if next(SearchSpace(asked).candidates(), None) is None:
                    empty += 1
                    words = explain_infeasible(asked)
                    assert ":" in words, words
                    assert any(number in words for number in (str(chips), "is ", "experts")), words
    assert empty > 15


def test_numbers_of_chips_that_have_layouts_are_named() -> None:
    from danlu.planner.infeasible import explain_infeasible, nearest_feasible_chips

    asked = question(cluster=machine(nodes=8, per_node=1), chips=7, without="pp")
    assert nearest_feasible_chips(asked) == [4, 8]
    assert "--chips 4 or 8 has layouts" in explain_infeasible(asked)


def test_how_many_chips_would_do_is_said() -> None:
    from danlu.planner.infeasible import chips_needed

    def asked(chips: int) -> PlanRequest:
        small = machine(nodes=chips // 4, memory=3.8e9)  # 16 chips need 3.64 GB, 8 need 3.95
        return question(chips=chips, cluster=small, without="pp", fix="recompute=full", reserve=0.0)

    assert not search(asked(4)).best
    enough = chips_needed(asked(4))
    assert enough == 16
    assert search(asked(enough), 1).best
    assert not search(asked(enough // 2), 1).best
    said = _said("--chips", "8", "--fix", "tp=8,cp=1,pp=1")
    assert "nothing fits 8 chips" in said
    assert "more --chips" not in said
    assert "--chips 16" in said or "--chips 32" in said


def test_the_option_that_was_written_is_the_one_that_is_named() -> None:
    with pytest.raises(PlanRequestError, match="--why-not: tp has no value"):
        parse_constraints("tp", option="--why-not")
