"""What the planner refuses says which rule refuses it, in the words of `danlu check`, and what would do."""

from pathlib import Path

import pytest
from made_questions import DENSE, EXPERTS, machine, question
from typer.testing import CliRunner

from danlu.cli.app import app
from danlu.planner import PlanRequest, PlanRequestError, parse_constraints, search
from danlu.planner.search_space import SearchSpace
from danlu.spec import toml

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
        ("virtual=5", "virtual=5: must be a number that is searched: 1, 2, 3, 4, 6, 8"),
        ("chunks=3", "chunks=3: must be a number that is searched: 1, 2, 4"),
        ("chunks=4", "`dispatch_chunks` is 4, but `degrees.ep` is 1, so tokens stay where they are"),
        ("dispatcher=deduplicated", "`token_dispatcher` is deduplicated, but `degrees.ep` is 1, so tokens stay"),
        ("dispatcher=once", "dispatcher=once is unknown: one of: alltoall, deduplicated"),
        ("microbatches=7", "`microbatches` is 7, but must divide the sequences of a rank"),
        ("microbatch=3", "microbatch = 3 does not divide the 2,048 sequences of a rank (`batch.sequences`"),
        ("microbatch=2,microbatches=8,pp=1,tp=8,cp=1", "makes 128 microbatches of the 256 sequences of a rank, but"),
        ("schedule=zbv,pp=1", '`pipeline.schedule` is "zbv", but `degrees.pp` is 1, so it is unused'),
        ("schedule=interleaved,virtual=8,pp=32", "which with `stages_per_rank` 8 makes 256 stages"),
        ("recompute=selective,schedule=zbv,pp=4", '`recompute` is "selective", but the schedule "zbv" splits'),
        ("reshard=true,schedule=zbv,pp=4", "`reshard_after_forward` is true, but the schedule"),
        ("regather=true,tp=1", "`regather_inputs` is true, but `degrees.tp` is 1, so no input is gathered"),
        ("regather=true,compile=true,tp=8", "`regather_inputs` is true, but `compile` is too"),
        ("regather=true,recompute=full,tp=8", "`regather_inputs` is true, but every layer recomputes"),
        ("schedule=1f1b,pp=8,tp=8,microbatches=1", 'is 1, but the schedule "1f1b" needs at least `pp` (8)'),
    ],
)
def test_every_knob_says_why(fix: str, said: str) -> None:
    assert said in _said("--fix", fix)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--exclude", "none,selective,full"], "--exclude names every recompute mode: remove one"),
        (["--exclude", "1f1b,interleaved,zero-bubble,zbv", "--fix", "pp=4"], "names every schedule, but pp = 4 needs"),
        (["--fix", "tp=8", "--why-not", "tp=4"], "--why-not tp=4 contradicts --fix or --exclude, which hold tp=8"),
        (["--exclude", "pp", "--why-not", "pp=4"], "--why-not pp=4 contradicts --fix or --exclude, which hold pp=1"),
        (["--exclude", "zbv", "--why-not", "schedule=zbv"], "--why-not schedule=zbv contradicts --exclude zbv"),
        (["--why-not", "microbatches=7"], "--why-not microbatches=7: `microbatches` is 7, but must divide"),
    ],
)
def test_options_that_leave_nothing_name_each_other(given: list[str], said: str) -> None:
    assert said in _said(*given)


def test_a_fixed_schedule_is_never_answered_without_a_pipeline() -> None:
    found = search(question(chips=8, cluster=machine(nodes=2), fix="schedule=zbv", sequences=64), 3)
    assert found.best and all(choice.plan.pipeline.schedule == "zbv" for choice in found.best)
    either = search(question(chips=8, cluster=machine(nodes=2), fix="schedule=1f1b|zbv", sequences=64), 3)
    assert any(choice.plan.degrees.pp == 1 for choice in either.best)


def test_a_neighbor_is_refused_in_the_words_of_check() -> None:
    from danlu.planner.explain import Explainer

    asked = question(chips=8, cluster=machine(nodes=2), fix="pp=1,tp=8,microbatch=1")
    refused = {one.change: one for one in Explainer(asked).rejections(search(asked, 1).best[0]) if one.kind == "rule"}
    smaller = refused["microbatch 1 → 0.5"]
    assert smaller.reason.startswith("`microbatches` is 32, but must divide the sequences of a rank")
    assert smaller.remedy == "microbatches = 16"
    assert refused["ep 1 → 2"].reason.startswith("`degrees.ep` is 2, but the model")


def test_a_rate_of_failures_without_a_tier_is_refused(tmp_path: Path) -> None:
    cluster = tmp_path / "cluster.toml"
    cluster.write_text(toml.dumps(machine().model_copy(update={"tiers": ()})))
    result = CliRunner().invoke(app, [*ASKED[:2], "--cluster", str(cluster), "--mtbf", "5 d"])
    assert result.exit_code == 2
    assert "--mtbf has no effect with --cluster" in result.stderr and "[[tiers]]" in result.stderr


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


def test_a_question_may_narrow_what_is_fixed() -> None:
    both = parse_constraints("tp=1|2,pp=4").joined(parse_constraints("tp=2|4", option="--why-not"), "--why-not")
    assert both.allowed == {"tp": {"2"}, "pp": {"4"}}


def test_the_option_that_was_written_is_the_one_that_is_named() -> None:
    with pytest.raises(PlanRequestError, match="--why-not: tp has no value"):
        parse_constraints("tp", option="--why-not")
