"""`danlu comm`: by which algorithm collectives are fastest on a cluster's network."""

from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from danlu.cli.json_output import print_json
from danlu.cli.probe_ranks import (
    EndpointOption,
    ProbeRank,
    RankOption,
    ThreadsOption,
    TokenOption,
    check_rank_count,
    measure_ranks,
    parse_probe_rank,
    refuse,
    round_curve,
    step_callback,
)
from danlu.report.collective_tables import algorithm_choices, choices_json, choices_table
from danlu.report.progress_bar import count_bar
from danlu.report.terminal import Console
from danlu.spec import Cluster, load_cluster
from danlu.spec.rank_placement import ranks_per_node
from danlu.spec.toml import dumps

if TYPE_CHECKING:
    from danlu.comm.collective_benchmark import LevelFanouts

app = typer.Typer(no_args_is_help=True, help="Collectives: by which algorithm each is fastest on a network.")
_ClusterArgument = Annotated[str, typer.Argument(metavar="CLUSTER", help="A cluster of the catalog, or its file.")]
_JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command("tune")
def tune_command(
    cluster: _ClusterArgument,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Write the cluster with the measured times here.", metavar="FILE"),
    ] = None,
    ranks: Annotated[
        int | None, typer.Option(min=2, help="Ranks that measure together; default: all chips of the cluster.")
    ] = None,
    threads: ThreadsOption = None,
    quick: Annotated[bool, typer.Option("--quick", help="A third of the time, less precise.")] = False,
    rank: RankOption = None,
    store: EndpointOption = "",
    token: TokenOption = None,
    as_json: _JsonOption = False,
) -> None:
    """Measure every collective by each of its algorithms, in groups on every level of a cluster's network.

    Runs and plans with the cluster file that is written take the fastest at each size. On several hosts start it once a
    rank, with --rank.
    """
    if output is not None and not output.parent.is_dir():
        refuse(f"--output: the folder {output.parent} does not exist: create it first")
    described = load_cluster(cluster)
    count = ranks or described.chips
    if count < 2:
        refuse("--ranks: must be 2 or more, but the cluster has one chip")
    if count > described.chips:
        refuse(f"--ranks: must be at most the {described.chips} chips of {cluster}, but is {count}")
    inner, *outer = ((level.name, level.fanout) for level in described.levels)
    levels = _fill_levels(((inner[0], ranks_per_node(count, described)), *outer), count)
    if rank is None and count > levels[0][1]:
        refuse(f"--rank: {count} ranks are on several nodes of {cluster}: start this once a rank, with --rank")
    probe_rank = parse_probe_rank(rank, count, store, token, levels)
    tuned = _measure(described, levels if probe_rank else levels[:1], probe_rank, threads, quick)
    if rank:
        return  # rank 0 prints
    if output is not None:
        output.write_text(dumps(tuned), encoding="utf-8")
    _print(tuned, as_json)
    if not as_json:
        typer.echo(f"written to {output}" if output else "nothing written: name a file with -o tuned.toml")


@app.command("show")
def show_command(cluster: _ClusterArgument, as_json: _JsonOption = False) -> None:
    """Show by which algorithm every collective of a tuned cluster runs, and why."""
    _print(load_cluster(cluster), as_json)


def _print(cluster: Cluster, as_json: bool) -> None:
    rows = algorithm_choices(cluster)
    if as_json:
        print_json(choices_json(rows))
        return
    if not rows:
        refuse(f"{cluster.name} has no measured algorithms: measure them with `danlu comm tune`")
    console = Console() if Console().is_terminal else Console(width=160)
    console.print(choices_table(rows))


def _fill_levels(levels: "LevelFanouts", ranks: int) -> "LevelFanouts":
    """How many units of each level so many ranks take."""
    filled, left = [], ranks
    for name, fanout in levels:
        here = min(fanout, left)
        if left % here:
            whole = " × ".join(str(count) for _, count in levels)
            refuse(f"--ranks: must fill the levels of the cluster, {whole}, evenly, but is {ranks}")
        filled.append((name, here))
        left //= here
    return tuple(filled)


def _measure(
    cluster: Cluster, levels: "LevelFanouts", probe_rank: ProbeRank | None, threads: int | None, quick: bool
) -> Cluster:
    """The cluster with the times of all algorithms on the given levels."""
    from danlu.chips import find_chip, host
    from danlu.chips.device_benchmark import MeasurementError
    from danlu.comm.rank_benchmark import QUICK, THOROUGH, measurement_names, no_benchmarks

    chip, ranks = find_chip(cluster.chip.kind), prod(fanout for _, fanout in levels)
    check_rank_count(chip, levels[0][1])
    settings = (QUICK if quick else THOROUGH).model_copy(update={"only_collectives": True})
    each = threads or max(1, host.physical_cores() // levels[0][1])
    with count_bar() as progress:
        names = measurement_names(levels, settings)
        task = progress.add_task("starting ranks", total=len(names))
        try:
            on_step = step_callback(progress, task)
            found = measure_ranks(chip.name, levels, probe_rank, each, settings, on_step, no_benchmarks)
        except MeasurementError as error:
            refuse(str(error))
    updated = []
    for level in cluster.levels:
        curves = tuple(round_curve(fit.cluster_entry) for fit in found.fits if fit.level == level.name)
        # What an earlier call has found of levels that these ranks do not reach stays.
        updated.append(level.model_copy(update={"collectives": curves}) if curves else level)
    source = f"{cluster.source}\nCollectives by algorithm: measured by danlu comm tune, {ranks} ranks at once.".strip()
    return cluster.model_copy(update={"levels": tuple(updated), "source": source})
