"""Options that have no effect together are rejected with exit code 2, and the message names both."""

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from danlu.cli.app import app
from danlu.cli.renamed import RENAMED_OPTIONS

ASKED = ["plan", "recipes/llama3-70b.toml", "--cluster", "h100-pod", "--chips", "8", "--fix", "tp=8"]
QUESTIONS = {
    "--why-not": ["tp=4"],
    "--what-if": ["pod.bandwidth=2x"],
    "--compare": ["recipes/plans/llama3-70b-h100.toml"],
    "--days": ["30"],
    "--max-length": [],
    "--min-memory": [],
    "--verify": [],
}


def _refused(arguments: list[str], *named: str) -> None:
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2, (arguments, result.output)
    for option in named:
        assert option in result.stderr.splitlines()[0], result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize("first", QUESTIONS)
def test_a_plan_answers_one_question_at_a_time(first: str) -> None:
    asked = [part for part in ASKED if first != "--compare" or part not in ("--chips", "8")]
    for second, value in QUESTIONS.items():
        if second != first:
            _refused([*asked, first, *QUESTIONS[first], second, *value], first, second)
    for option, value in {"--html": ["p.html"], "--open": [], "--output": ["p.toml"]}.items():
        if (first, option) != ("--verify", "--output"):
            _refused([*asked, first, *QUESTIONS[first], option, *value], first, option)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ([*ASKED, "--tokens", "15T"], ("--tokens", "--days")),
        ([*ASKED, "--compare", "recipes/plans/llama3-70b-h100.toml"], ("--compare", "--chips")),
        ([*ASKED, "--exclude", "tp"], ("--fix", "--exclude", "tp")),
        ([*ASKED[:-1], "tp=8,tp=4"], ("--fix", "tp=8|4")),
        ([*ASKED, "--imbalance", "1.5"], ("--imbalance", "experts")),
        (["train", "--resume", "no-run", "--name", "x"], ("--resume", "--name")),
        (["resume", "no-run", "--wait"], ("--wait", "--nodes")),
        (["resume", "no-run", "--nodes", "2", "--nproc", "2"], ("--nodes", "--nproc")),
        (
            ["launch", "recipes/quickstart.toml", "--on", "slurm", "--nodes", "1", "--dry-run", "--wait"],
            ("--dry-run", "--wait"),
        ),
        (["show", "no-run", "--json", "--open"], ("--json", "--open")),
        (["probe", "--levels", "node:2"], ("--levels", "--rank")),
        (["probe", "--rank", "0", "--ranks", "2", "--levels", "node:2"], ("--rank", "--rdzv-endpoint")),
        (["data", "locate", "recipes/quickstart.toml", "--step", "1", "--plan", "p.toml"], ("--plan", "--rank")),
        (["import", "hf", "d", "-o", "o", "--no-compare", "--tolerance", "1"], ("--no-compare", "--tolerance")),
        (["export", "hf", "r", "-o", "o", "--no-compare", "--tolerance", "1"], ("--no-compare", "--tolerance")),
        (["ckpt", "ls", "no-run", "--s3", "endpoint=x"], ("--s3", "s3://")),
    ],
)
def test_what_has_no_effect_is_refused(arguments: list[str], named: tuple[str, ...]) -> None:
    _refused(arguments, *named)


def test_the_table_names_commands_and_options_that_exist_and_every_command_asks_it() -> None:
    from danlu.cli.option_rules import OPTION_RULES, NoEffectWith, OptionCheckingCommand, Requires

    options: dict[str, set[str]] = {}

    def walk(command: object, name: str) -> None:
        for word, inner in getattr(command, "commands", {}).items():
            walk(inner, f"{name} {word}".strip())
        if not hasattr(command, "commands"):
            assert isinstance(command, OptionCheckingCommand), name
            options[name] = {opt for one in command.params for opt in (*one.opts, *one.secondary_opts)}

    walk(get_command(app), "")
    for name, rules in OPTION_RULES.items():
        for rule in rules:
            named = {*rule.options} if not isinstance(rule, NoEffectWith) else {rule.option, *rule.ignored}
            if isinstance(rule, Requires) and rule.needed.startswith("--"):
                named.add(rule.needed)
            assert named <= options[name] | {"--set"}, name


def test_a_default_that_is_spelled_out_counts_and_no_open_does_not() -> None:
    result = CliRunner().invoke(app, ["show", "no-run", "--json", "--no-open", "--runs-dir", "."])
    assert "no effect" not in result.output


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (["catalogue"], "danlu catalog"),
        (["ckpt", "mend", "x"], "danlu ckpt repair"),
        (["data", "at", "--step", "3"], "danlu data locate"),
        (["validate", "--json"], "python benchmarks/validation/validate.py, in a clone of Danlu's repository"),
    ],
)
def test_a_command_that_was_renamed_says_its_new_name(old: list[str], new: str) -> None:
    done = CliRunner().invoke(app, old)
    assert done.exit_code == 2 and done.stderr.strip().endswith(f"is now called: {new}")


@pytest.mark.parametrize(
    "line",
    [
        "plan recipe.toml --longest",
        "plan recipe.toml --page=plan.html",
        "plan recipe.toml --without pp",
        "dryrun recipe.toml --whole",
        "runs --folder elsewhere",
        "ckpt ls run --folder elsewhere",
        "probe --store host:1",
    ],
)
def test_an_old_option_is_refused_with_the_new_one(line: str) -> None:
    done = CliRunner().invoke(app, line.split())
    old = next(word for word in line.split() if word.startswith("--")).partition("=")[0]
    assert (done.exit_code, done.stderr.strip()) == (2, f"{old} is now called: {RENAMED_OPTIONS[old]}")
