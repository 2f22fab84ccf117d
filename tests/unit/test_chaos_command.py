"""What `danlu chaos` refuses: nothing that was asked for is ignored."""

from pathlib import Path

import pytest
from made_runs import make_run
from typer.testing import CliRunner

from danlu.cli.app import app


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "has no rank on this host"),
        (["--fault", "boom"], "--fault must be one of kill, segfault"),
        (["--mix", "boom"], "--mix must be one of llama3"),
        (["--mix", "hangs", "--fault", "kill"], "give one of the two"),
    ],
)
def test_what_cannot_be_done_is_refused_in_one_line(tmp_path: Path, words: list[str], said: str) -> None:
    run = make_run(tmp_path / "runs" / "quiet")
    result = CliRunner().invoke(app, ["chaos", str(run.path), *words])
    assert result.exit_code == 2 and said in result.output, result.output
