"""`danlu lab`: a cluster's network on this machine, to rehearse a run on it."""

import signal
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.table import Table

from danlu.cli.json_output import print_json
from danlu.cli.run_options import ClusterOption, NameOption, PlanOption, RanksPerNodeOption, RecipeArgument
from danlu.cli.slurm_submit import resolve_ranks_per_node
from danlu.report import ProgressDisplay, summary
from danlu.report.terminal import Console, print_warning
from danlu.scheduler.network_lab import LabError, NetworkLab, find_lab, lab_down, lab_up, levels_of
from danlu.spec import load_cluster

app = typer.Typer(no_args_is_help=True, help="A cluster's network on this machine, to rehearse a run on it.")

LabOption = Annotated[str, typer.Option("--lab", help="Name of the lab.")]
LabArgument = Annotated[str, typer.Argument(metavar="LAB", help="Name of the lab.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
_TUNE_PORT = 29400
"""Nothing else listens on a lab's hosts."""


@app.command()
def up(
    cluster: Annotated[str, typer.Argument(metavar="CLUSTER", help="A cluster of the catalog, or its file.")],
    name: Annotated[str, typer.Option(help="Name of the lab.")] = "lab",
    slower: Annotated[float, typer.Option(min=1.0, help="Times as slow as the cluster's own links.")] = 1.0,
    as_json: JsonOption = False,
) -> None:
    """Make a namespace for every node of a cluster, joined by switches and links of its levels. Needs root."""
    try:
        described = load_cluster(cluster)
        file = str(Path(cluster).resolve()) if Path(cluster).is_file() else cluster
        lab = lab_up(name, levels_of(described, slower), slower, file if described.chip.kind == "cpu" else "")
    except LabError as error:
        _fail(error)
    _show(lab, as_json)
    if not as_json:
        typer.echo(f"train on it: danlu lab train RECIPE.toml --lab {name}; end it: danlu lab down {name}")


@app.command()
def down(name: LabArgument = "lab") -> None:
    """Remove a lab's namespaces."""
    try:
        find_lab(name)
        count = lab_down(name)
    except LabError as error:
        _fail(error)
    typer.echo(f'lab "{name}" is down: {count} namespaces removed')


@app.command()
def show(name: LabArgument = "lab", as_json: JsonOption = False) -> None:
    """Show a lab's levels and hosts."""
    try:
        _show(find_lab(name), as_json)
    except LabError as error:
        _fail(error)


@app.command()
def train(
    recipe: RecipeArgument,
    lab: LabOption = "lab",
    nodes: Annotated[int | None, typer.Option(min=1, help="Number of hosts; default: all but the spares.")] = None,
    ranks_per_node: RanksPerNodeOption = None,
    spares: Annotated[int, typer.Option(min=0, help="Further hosts that wait to replace one that is lost.")] = 0,
    plan: PlanOption = None,
    cluster: ClusterOption = None,
    name: NameOption = None,
) -> None:
    """Train on the hosts of a lab, with an agent on each and a coordinator, as on a cluster.

    The run's cluster is the lab's own, unless its chips are others than this machine's.
    """
    from danlu.runs.prepare import prepare_run
    from danlu.runs.train import follow_ranks, record_outcome, write_page
    from danlu.scheduler.lab_launcher import LabLauncher

    try:
        found = find_lab(lab)
    except LabError as error:
        _fail(error)
    cluster = cluster or found.cluster or None
    count = nodes if nodes is not None else len(found.hosts) - spares
    if count < 1 or count + spares > len(found.hosts):
        _fail(LabError(f'{count} hosts and {spares} spares must be at most the {len(found.hosts)} of lab "{lab}"'))
    each = resolve_ranks_per_node(count, ranks_per_node, plan, cluster)
    console = Console(highlight=False)
    run, lock = prepare_run(recipe, plan, cluster, name, count * each, console=console)
    console.print(f'run {run.path}: {count} hosts × {each} ranks of lab "{lab}"', markup=False)
    if lock.warning:
        print_warning(lock.warning)
    live = ProgressDisplay(run, console)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # `danlu stop` is Ctrl-C from another terminal
    with lock, LabLauncher(run, found, count, each, spares) as launcher:
        try:
            result = follow_ranks(launcher, live, console)
        except KeyboardInterrupt:
            console.print("stopping after this step; the checkpoint is written first")
            launcher.stop()
            result = follow_ranks(launcher, ProgressDisplay(run, console), console)
        record_outcome(run, result)
    write_page(run)
    if run.events.exists():
        console.print(summary(run))
    raise typer.Exit(result.exit_code)


@app.command()
def tune(
    lab: LabOption = "lab",
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Write the cluster with the measured times here.", metavar="FILE"),
    ] = None,
    ranks_per_node: Annotated[int | None, typer.Option(min=1, help="Default: one per chip of the cluster.")] = None,
    cluster: ClusterOption = None,
    quick: Annotated[bool, typer.Option("--quick", help="A third of the time, less precise.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Measure every collective by each of its algorithms on all hosts of a lab: `danlu comm tune` on a network.

    The cluster is the lab's own, unless its chips are others than this machine's.
    """
    from danlu.scheduler.lab_command import LabCommandError, run_on_hosts

    try:
        found = find_lab(lab)
        described = cluster or found.cluster
        if not described:
            raise LabError(f'lab "{lab}" is the network of other chips than are here: name a cluster with --cluster')
        each = ranks_per_node or load_cluster(described).chips_per_node
        endpoint = f"{found.hosts[0].address}:{_TUNE_PORT}"
        command = [sys.executable, "-m", "danlu", "comm", "tune", described, "--rdzv-endpoint", endpoint]
        command += ["--ranks", str(each * len(found.hosts))]
        command += ["--output", str(output)] if output else []
        command += ["--quick"] if quick else []
        run_on_hosts(found, each, [*command, *(["--json"] if as_json else [])])
    except (LabError, LabCommandError) as error:
        _fail(error)


def _show(lab: NetworkLab, as_json: bool) -> None:
    if as_json:
        print_json(asdict(lab))
        return
    table = Table(title=f"lab {lab.name}: {len(lab.hosts)} hosts, {lab.slower:g} times as slow")
    for column in ("level", "joins", "rate of a link", "delay"):
        table.add_column(column)
    for level in lab.levels:
        delay = f"{1e6 * level.delay:.0f} us" if level.delay else "the kernel's own"
        table.add_row(level.name, str(level.fanout), f"{8 * level.rate / 1e6:,.0f} Mbit/s", delay)
    console = Console()
    console.print(table)
    first, last = lab.hosts[0], lab.hosts[-1]
    typer.echo(f"hosts {first.name} ({first.address}) to {last.name} ({last.address})")
    typer.echo(f"a shell on one: {' '.join(first.enter)} bash")
    if lab.remark:
        typer.echo(f"warning: {lab.remark}", err=True)


def _fail(error: RuntimeError) -> NoReturn:
    typer.echo(str(error), err=True)
    raise typer.Exit(2)
