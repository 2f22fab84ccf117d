"""Every mistake is named with its location, the value, what was expected and the nearest valid one."""

import json
import re
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from broken_files import CLUSTER, CONTRADICTIONS, EXPERTS, PLAN, READING, RECIPE, Files
from typer.testing import CliRunner, Result

from danlu.cli.app import app
from danlu.comm.rank_layout import dense_ranks, expert_layout
from danlu.spec import Cluster, SpecError, rules
from danlu.spec.check import find_problems, load_run_spec, parsed_without_file
from danlu.spec.load import read_cluster, read_plan, read_recipe
from danlu.spec.plan import Axis, Degrees, Plan
from danlu.spec.rank_placement import PlacementError
from danlu.spec.toml import read

NOT_ONE_SETTING = {
    "gradients-of-one-microbatch",
    "batch-too-small-for-pipeline",
    "cache-without-store",
    "decay-ignored",
    "evaluation-named-twice",
    "evaluation-of-less-than-a-sequence",
    "evaluation-on-training-data",
    "evaluation-without-data",
    "samples-without-prompts",
    "experts-off-their-ranks",
    "group-matches-nothing",
    "group-never-wins",
    "group-of-vectors-by-muon",
    "group-sets-nothing",
    "level-indivisible",
    "level-overfull",
    "loss-scale-ignored",
    "mapping-without-cluster",
    "muon-settings-ignored",
    "pattern-matches-nothing",
    "pattern-of-experts",
    "peak-missing",
    "pipeline-ignored",
    "pipeline-layers-entries",
    "ramp-starves-the-pipeline",
    "shape-ignored",
    "rewind-ignored",
    "rewind-of-the-only-checkpoint",
    "rewind-without-checkpoints",
    "run-too-short-for-spikes",
    "source-named-twice",
    "spike-settings-ignored",
    "store-unknown",
    "store-without-cache",
    "weights-too-fine",
    "uneven-ranks",
    "unknown-level",
    "wandb-without-project",
    "block-ignored",
    "operators-compiled",
    "head-quantized",
}
"""Cases whose mend is more than one number: a removal, a name, two settings at once."""

ALL = {**READING, **CONTRADICTIONS}


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def run(files: Files, *more: str) -> Result:
    return CliRunner().invoke(app, ["check", *files.write(Path()), *more])


@pytest.mark.parametrize("name", ALL)
def test_message(name: str, snapshot: Callable[[str, str], None]) -> None:
    result = run(ALL[name])
    assert result.exit_code == 2, result.output
    snapshot(f"check/{name}", result.stderr)


def test_every_rule_has_a_case() -> None:
    quiet = {rule.__name__ for rule in (*rules.RECIPE_RULES, *rules.PLAN_RULES, *rules.LAYOUT_RULES)}
    quiet |= {rule.__name__ for rule in (*rules.NETWORK_RULES, *rules.CHIP_RULES, rules.mapping_needs_cluster)}
    for files in CONTRADICTIONS.values():
        quiet -= _speaking(files)
    assert not quiet


def _speaking(files: Files) -> set[str]:
    files.write(Path())
    recipe, cluster = read_recipe(Path("recipe.toml")), read_cluster("cluster.toml") if files.cluster else None
    plan = read_plan(Path("plan.toml")) if files.plan else parsed_without_file(Plan())
    calls: list[tuple[Any, tuple[Any, ...]]] = [(rule, (recipe,)) for rule in rules.RECIPE_RULES]
    calls += [(rule, (plan,)) for rule in rules.PLAN_RULES]
    calls += [(rule, (recipe, plan)) for rule in rules.LAYOUT_RULES]
    if cluster:
        calls += [(rule, (plan, cluster)) for rule in rules.NETWORK_RULES]
        calls += [(rule, (recipe, cluster)) for rule in rules.CHIP_RULES]
    else:
        calls.append((rules.mapping_needs_cluster, (plan,)))
    return {rule.__name__ for rule, arguments in calls if list(rule(*arguments))}


@pytest.mark.parametrize("name", sorted(CONTRADICTIONS.keys() - NOT_ONE_SETTING))
def test_suggested_number_mends_it(name: str) -> None:
    """Where a suggestion is `key = value`, doing as it says silences that problem and raises no other about the key."""
    arguments = CONTRADICTIONS[name].write(Path())
    problem = _problems(arguments)[0]
    found = re.match(r"(\w+) = (\d+|true|false|\"[\w-]+\"|\[[\d, ]+\])", problem["suggestion"])
    assert found, problem["suggestion"]
    table = [*re.split(r"[.\[\]]+", problem["key"])]
    table = table if problem["key"] == "degrees" else table[:-1] if found[1] == table[-1] else table
    _set(Path(problem["file"]), [*table, found[1]], json.loads(found[2]))
    others = _problems(arguments)
    assert problem["message"] not in [other["message"] for other in others]
    assert problem["key"] not in [other["key"] for other in others]


def _problems(arguments: list[str]) -> list[dict[str, str]]:
    result = CliRunner().invoke(app, ["check", *arguments, "--json"])
    answer: list[dict[str, str]] = json.loads(result.stdout)["problems"]
    return answer


def _set(path: Path, key: list[str], value: object) -> None:
    values: Any = read(path).values
    inner = values
    for part in key[:-1]:
        inner = inner[int(part)] if part.isdigit() else inner.setdefault(part, {})
    inner[key[-1]] = value
    path.write_text(tomli_w.dumps(values), encoding="utf-8")


@pytest.mark.parametrize(
    ("files", "said"),
    [
        (Files(), "model, 181k parameters, bf16, 1 rank"),
        (Files(EXPERTS), "model, 306k parameters, 158k active, bf16, 1 rank"),
        (Files(RECIPE, PLAN, CLUSTER), "model, 181k parameters, bf16, 2 ranks of the 24 chips of small"),
        (
            Files(
                EXPERTS, "[degrees]\nshard = 2\ntp = 4\nep = 4\n[mapping]\ntp = {node = 4}\nep = {node = 4}\n", CLUSTER
            ),
            "8 ranks of the 24 chips of small",
        ),
        (
            Files(
                RECIPE,
                "microbatches = 4\ndegrees = {pp = 2, cp = 4, tp = 2}\n"
                'pipeline = {schedule = "zbv", stages_per_rank = 2}\n',
            ),
            "16 ranks",
        ),
    ],
)
def test_what_is_right_passes_with_one_line(files: Files, said: str) -> None:
    result = run(files)
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("recipe.toml: no problems: ")
    assert result.stdout.endswith(f"{said}\n")
    assert result.stdout.count("\n") == 1


def test_json_of_what_is_right() -> None:
    answer = json.loads(run(Files(RECIPE, PLAN, CLUSTER), "--json").stdout)
    assert answer["problems"] == []
    assert (answer["parameters"], answer["world"], answer["chips"]) == (180800, 2, 24)


def test_json_carries_place_and_suggestion() -> None:
    result = run(CONTRADICTIONS["kv-heads-by-tp"], "--json")
    assert result.exit_code == 2
    (problem,) = json.loads(result.stdout)["problems"]
    assert (problem["file"], problem["line"], problem["key"]) == ("plan.toml", 2, "degrees.tp")
    assert problem["suggestion"] == "tp = 4"


def test_files_that_are_not_there(snapshot: Callable[[str, str], None]) -> None:
    Path("recipes.toml").write_text(RECIPE)
    Path("folder").mkdir()
    arguments = ["check", "recipe.toml", "--plan", "folder", "--cluster", "h100-pot"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    snapshot("check/not-there", result.stderr)


def test_a_long_path_stays_in_one_piece() -> None:
    folder = Path("a" * 100, "b" * 100)
    folder.mkdir(parents=True)
    (folder / "recipe.toml").write_text(RECIPE.replace("warmup = 10", "warmup = 101"))
    result = CliRunner().invoke(app, ["check", str(folder / "recipe.toml")])
    assert f"{folder}/recipe.toml:21: schedule.warmup: is 101" in result.stderr


def test_a_plan_without_a_file_is_named() -> None:
    Files().write(Path())
    with pytest.raises(SpecError) as caught:
        load_run_spec(Path("recipe.toml"), default=Plan(degrees=Degrees(shard=3)))
    assert "recipe.toml:17: batch.sequences: is 16, but must be a multiple" in str(caught.value)
    with pytest.raises(SpecError, match=re.escape("plan (default):1: degrees.tp: is 8")):
        load_run_spec(Path("recipe.toml"), default=Plan(degrees=Degrees(tp=8)))


def test_check_all_returns_what_it_read() -> None:
    Files(RECIPE, PLAN, CLUSTER).write(Path())
    checked = load_run_spec(Path("recipe.toml"), Path("plan.toml"), "cluster.toml")
    assert checked.recipe.model.layers == 4
    assert checked.plan.degrees.shard == 2
    assert checked.cluster is not None
    assert checked.cluster.chips == 24


def test_check_finds_the_same_as_the_command() -> None:
    Files(RECIPE, "[degrees]\ntp = 8\n[mapping]\ntp = {node = 8}\n").write(Path())
    found = find_problems(read_recipe(Path("recipe.toml")), read_plan(Path("plan.toml")))
    assert [problem.key for problem in found] == ["degrees.tp", "mapping"]


def test_what_passes_can_be_placed_and_what_does_not_cannot() -> None:
    """The rules of the network agree with the room that lays ranks out."""
    Files(EXPERTS, cluster=CLUSTER).write(Path())
    cluster, verdicts = read_cluster("cluster.toml"), list[bool]()
    for shard, tp, ep, node, ep_node in product(
        (1, 2, 3, 4, 5, 7), (1, 2, 4), (1, 2, 4), (None, 1, 2, 4), (None, 1, 2)
    ):
        if shard * tp % ep:
            continue
        mapping: dict[Axis, dict[str, int]] = {} if node is None else {"tp": {"node": node, "fabric": tp // node or 1}}
        mapping |= {} if ep_node is None else {"ep": {"node": ep_node, "fabric": ep // ep_node or 1}}
        plan = Plan(degrees=Degrees(shard=shard, tp=tp, ep=ep), mapping=mapping)
        found = [problem for rule in rules.PLAN_RULES for problem in rule(parsed_without_file(plan))]
        found += [problem for rule in rules.NETWORK_RULES for problem in rule(parsed_without_file(plan), cluster)]
        verdicts.append(not found)
        assert verdicts[-1] == _is_placed(plan, cluster.value), (plan, found)
    assert True in verdicts and False in verdicts


def _is_placed(plan: Plan, cluster: Cluster) -> bool:
    try:
        dense_ranks(plan, cluster)
        expert_layout(plan, cluster)
    except PlacementError:
        return False
    return True
