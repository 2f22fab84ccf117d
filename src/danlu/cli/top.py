"""`danlu top`: a run as it goes, in the terminal."""

from dataclasses import asdict
from typing import Annotated

import typer

from danlu.cli.ckpt_ref import fail
from danlu.cli.json_output import print_json
from danlu.cli.run_options import RunArgument, RunsDirOption
from danlu.spec.run_folder import DEFAULT_RUNS_DIR


def top(
    run: RunArgument,
    folder: RunsDirOption = DEFAULT_RUNS_DIR,
    as_json: Annotated[bool, typer.Option("--json", help="Print the ranks once, as JSON.")] = False,
) -> None:
    """Show a run as it goes: its ranks on this host, who is waited for, faults, warnings and goodput."""
    from danlu.report.live_view import LiveRun
    from danlu.report.run_tables import find_run

    live = LiveRun(find_run(run, folder))
    if as_json:
        print_json([asdict(row) for row in live.rows()])
        return
    try:
        from danlu.report.top_app import TopApp
    except ImportError:
        fail("`danlu top` draws with textual, which is not installed: pip install 'danlu[top]'")
    TopApp(live).run()
