"""`danlu train`: a run on this machine, from recipe to page."""

import time
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.text import Text

from danlu.cli.local_launcher import LocalLauncher
from danlu.cli.precision_warning import warn_slow_precision
from danlu.cli.prepare import DEFAULT_RUNS_DIR, prepare_locked_run
from danlu.cli.rank_failure import count_oom_kills, describe_failure, log_tail
from danlu.report import ProgressDisplay, formatting, summary, write_run_page
from danlu.report.run_tables import find_run
from danlu.report.terminal import Console
from danlu.spec import EndEvent, RunFolder, SpecError, load_plan, load_recipe, toml
from danlu.spec.check import load_run_spec
from danlu.spec.plan import fully_sharded_plan
from danlu.spec.problem import problem_at
from danlu.storage import run_lock
from danlu.storage.access import set_umask
from danlu.storage.run_lock import RunError, RunLock

EXIT_STOPPED = 3
"""Exit code of a run that was stopped before its last step: a shell does not run what follows `&&`."""


def train(
    recipe: Annotated[Path | None, typer.Argument(help="What to train.", metavar="RECIPE.toml")] = None,
    nproc: Annotated[
        int | None, typer.Option(min=1, help="Number of processes; default: what the plan needs, or 1.")
    ] = None,
    plan: Annotated[Path | None, typer.Option(help="Parallel layout; default: FSDP over all ranks.")] = None,
    cluster: Annotated[str | None, typer.Option(help="A cluster of the catalog, or its file.")] = None,
    name: Annotated[str | None, typer.Option(help="Name of the run; default: the recipe's.")] = None,
    resume: Annotated[str | None, typer.Option(metavar="RUN", help="Resume a run; its layout may change.")] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Change the recipe: optimizer.learning_rate=1e-4; repeatable."),
    ] = None,
) -> None:
    """Train on this machine, show the progress, and write a page about the run.

    `--set` takes dotted keys of the recipe and TOML values; the run's recipe.toml shows the result.
    """
    console = Console(highlight=False)
    if (recipe is None) == (resume is None):
        raise typer.BadParameter("give a recipe to start a run, or --resume RUN to resume one")
    if resume is not None:
        run, lock = prepare_resume(resume, nproc, plan, cluster)
    else:
        assert recipe is not None
        world = _world_size(nproc, plan)
        run, lock = prepare_locked_run(recipe, plan, cluster, name, world, settings or ())
    world = load_plan(run.plan).degrees.world
    if plan is None and resume is None and world > 1:
        console.print(f"no plan given: states sharded over all {world} ranks (plain FSDP)")
    raise typer.Exit(train_run(run, world, console, lock))


def _world_size(nproc: int | None, plan: Path | None) -> int:
    """Number of processes, as requested or as the plan needs; both must agree."""
    if plan is None:
        return nproc or 1
    needed = load_plan(plan).degrees.world
    if nproc is not None and nproc != needed:
        line = toml.read(plan).line(("degrees",))
        message = f"lay out {needed} ranks, but --nproc is {nproc}"
        raise SpecError([problem_at(plan, line, "degrees", message, f"--nproc {needed}, or omit it")])
    return needed


def prepare_resume(
    name: str, nproc: int | None, plan: Path | None, cluster: str | None, folder: Path = DEFAULT_RUNS_DIR
) -> tuple[RunFolder, RunLock]:
    """The folder of a run to resume and its lock, acquired before its plan and cluster are replaced."""
    run = find_run(name, folder)
    lock = run_lock.acquire(run)
    try:
        _replace_layout(run, nproc, plan, cluster)
    except BaseException:
        lock.release()
        raise
    return run, lock


def _replace_layout(run: RunFolder, nproc: int | None, plan: Path | None, cluster: str | None) -> None:
    if plan is None and nproc in (None, load_plan(run.plan).degrees.world):
        plan = run.plan
    if cluster is None and run.cluster.exists():
        cluster = str(run.cluster)
    _check_not_finished(run)
    world = _world_size(nproc, plan)
    checked = load_run_spec(run.recipe, plan, cluster, default=fully_sharded_plan(world))
    warn_slow_precision(checked)
    set_umask(checked.recipe.access)
    texts = {run.plan: toml.dumps(checked.plan)}
    if checked.cluster is not None:
        texts[run.cluster] = toml.dumps(checked.cluster)
    try:
        for path, text in texts.items():
            fresh = path.with_name(f".{path.name}.new")  # atomic: a full disk leaves the old one
            fresh.write_text(text)
            fresh.replace(path)
    except OSError as error:
        raise RunError(f"{run.path} cannot be written to: {error.strerror}; nothing was started") from None


def _check_not_finished(run: RunFolder) -> None:
    """A run whose steps are all done cannot be resumed."""
    steps = load_recipe(run.recipe).steps
    done = max((event.step for event in run.read_events() if event.kind in ("step", "ended")), default=0)
    if done >= steps:
        line = toml.read(run.recipe).line(("steps",))
        message = f"is {steps}, and all of them are done"
        raise SpecError([problem_at(run.recipe, line, "steps", message, "raise it to train on")])


def train_run(run: RunFolder, world: int, console: Console, lock: RunLock) -> int:
    """Start the ranks, show their progress, and write the page; returns the exit code.

    A full or read-only disk is reported, and training continues: nothing this process writes is worth failing the run.
    """
    recipe = load_recipe(run.recipe)
    size = f"{recipe.steps} steps, {world} rank{'s' * (world > 1)}"
    title = f"run {formatting.relative_path(run.path)}: {recipe.model.name}, {size}, {recipe.precision.label}"
    console.print(title, markup=False)
    if lock.warning:
        console.print(Text.assemble(("warning ", "yellow"), lock.warning), soft_wrap=True)
    live, kills = ProgressDisplay(run, console), count_oom_kills()
    try:
        with lock, live, LocalLauncher(run, world, lock) as ranks:
            failed = ranks.wait(lambda: live.update(ranks.links.poll_events(), ranks.links.slowest_phase))
            live.close()
            if failed is not None:
                _record_failure(run, failed, ranks, console, kills)
    except OSError as error:
        raise RunError(f"the ranks could not be started: {error}") from None
    _report_end(run, console)
    if failed is not None and not ranks.stop_requested:
        return 1
    finished = live.history.end is not None and live.history.end.outcome == "finished"
    stopped = ranks.stop_requested or (live.history.end is not None and live.history.end.outcome == "stopped")
    return EXIT_STOPPED if stopped and not finished else 0


def _report_end(run: RunFolder, console: Console) -> None:
    if not run.events.exists():
        return
    try:
        write_run_page(run)
    except OSError as error:
        warning = f"the page could not be written: {error}; `danlu show {run.name}` writes it once there is space"
        console.print(Text.assemble(("warning ", "yellow"), warning), soft_wrap=True)
    console.print(summary(run))


def _record_failure(run: RunFolder, rank: int, ranks: LocalLauncher, console: Console, kills: int | None) -> None:
    """Print which rank failed first, with the end of its log, and record it."""
    code = ranks.processes[rank].returncode
    if ranks.stop_requested and code < 0:
        message = "killed on request: progress after the newest checkpoint is lost"
        _record_end(run, "stopped", message, console)
        return
    try:
        log = ranks.log_path(rank).read_text(errors="replace")
    except OSError as error:
        log = f"its log cannot be read: {error}"
    message = describe_failure(rank, code, log, kills)
    console.print(Text(f"{message}; full log: {ranks.log_path(rank)}", style="red"), soft_wrap=True)
    for line in log_tail(rank, log):
        console.print(Text(f"  {line}", style="dim"), soft_wrap=True)
    _record_end(run, "failed", message, console)


def _record_end(run: RunFolder, outcome: Literal["failed", "stopped"], message: str, console: Console) -> None:
    step = max((event.step for event in run.read_events() if event.kind == "step"), default=0)
    try:
        with run.events.open("a") as events:
            ended = EndEvent(time=time.time(), step=step, outcome=outcome, message=message)
            events.write(ended.model_dump_json() + "\n")
    except OSError as error:
        warning = f"the end of the run could not be recorded in {run.events}: {error.strerror}"
        console.print(Text.assemble(("warning ", "yellow"), warning), soft_wrap=True)
