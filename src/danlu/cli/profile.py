"""`danlu profile`: where the time of real steps goes, against the prediction."""

from pathlib import Path
from typing import Annotated

import typer

from danlu.cli.ckpt_ref import JsonOption, fail
from danlu.cli.json_output import print_json
from danlu.cli.run_options import ClusterOption, RunsDirOption
from danlu.report import formatting
from danlu.report.profile_tables import parts_table, profile_json, summary_lines
from danlu.report.run_tables import find_run
from danlu.report.terminal import Console
from danlu.spec.run_folder import DEFAULT_RUNS_DIR


def profile(
    run: Annotated[
        str, typer.Argument(metavar="RUN|RECIPE.toml", help="A run, at its newest checkpoint; or what to train.")
    ],
    steps: Annotated[int, typer.Option(min=1, help="Steps to profile.")] = 3,
    ranks: Annotated[str, typer.Option(metavar="0,1,…", help="Ranks to profile; default: all of them.")] = "",
    output: Annotated[
        Path, typer.Option("--output", "-o", help="The trace: open it in ui.perfetto.dev or chrome://tracing.")
    ] = Path("profile.json"),
    plan: Annotated[Path | None, typer.Option(help="Parallel layout; default: the run's.")] = None,
    cluster: ClusterOption = None,
    nproc: Annotated[int | None, typer.Option(min=1, help="Ranks on this machine; default: the run's.")] = None,
    warmup: Annotated[int, typer.Option(min=0, help="Steps before anything is timed.")] = 3,
    folder: RunsDirOption = DEFAULT_RUNS_DIR,
    as_json: JsonOption = False,
) -> None:
    """Profile steps of a run on ranks of this machine: a Perfetto trace, and predicted against measured time by part.

    The run is only read, so it may still be training; but then it shares the machine with these ranks.
    """
    from danlu.planner.request import PlanRequestError
    from danlu.runs.profile import profile as profile_steps
    from danlu.runs.train import TrainError

    if not output.absolute().parent.is_dir():
        fail(f"--output: the folder {output.parent} does not exist: create it first")
    what = Path(run) if run.endswith(".toml") else find_run(run, folder)
    console = Console(highlight=False, quiet=as_json)
    chosen = _parse_ranks(ranks)
    try:
        result = profile_steps(
            what,
            steps=steps,
            ranks=chosen,
            plan=plan,
            cluster=cluster,
            nproc=nproc,
            warmup=warmup,
            console=console,
        )
    except (TrainError, PlanRequestError) as error:
        fail(str(error))
    size = result.write_trace(output)
    if as_json:
        print_json({"run": result.name, **profile_json(result.profiles, result.prediction)}, indent=None)
        return
    console.print(parts_table(result.profiles, result.prediction))
    for line in summary_lines(result.profiles):
        console.print_line(line)
    if result.prediction is None:
        console.print_line(
            "nothing is predicted without a cluster: --cluster FILE (`danlu probe -o FILE` measures this machine)",
            "yellow",
        )
    for assumption in result.prediction.assumptions if result.prediction else ():
        console.print_line(f"assumed: {assumption}", "dim")
    console.print_line(f"trace: {output} ({formatting.size(size)}); open it in ui.perfetto.dev")


def _parse_ranks(text: str) -> tuple[int, ...]:
    words = [word.strip() for word in text.split(",")] if text else []
    for word in words:
        if not word.isdecimal():
            fail(f'--ranks: "{word}" must be the number of a rank, such as 0,1')
    return tuple(map(int, words))
