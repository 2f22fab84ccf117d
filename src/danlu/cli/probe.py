"""`danlu probe`: measure this machine and write it down as a cluster."""

import json
import os
import platform
import socket
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from math import floor, log10
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn, TypeVar

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from danlu.cost.stragglers import behind
from danlu.report.wording import flops, size
from danlu.spec import Chip, Cluster, Curve, Level, Operator, Tier
from danlu.spec.toml import dumps

if TYPE_CHECKING:
    from danlu.chips import Descriptor
    from danlu.chips.measure import DiskSpeed
    from danlu.comm.collective_speed import Fanouts
    from danlu.comm.measure import RankFigures


_CurveKind = TypeVar("_CurveKind", bound=Curve)

_QUIET = 0.5
"""Runnable processes a core above which other work would take a share that shows in the figures."""


@dataclass(frozen=True)
class _Figures:
    """Everything that was measured."""

    chip: "Descriptor"
    ranks: "RankFigures"
    disk: "DiskSpeed"
    host_copy: float
    """Bytes a second the host copies in its own memory, all ranks together."""
    host_memory: int
    chip_memory: int
    """Of one rank: its device's, or its share of the host's."""


def probe(
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write the cluster file here.")] = None,
    ranks: Annotated[
        int | None, typer.Option(min=1, help="Ranks to run at once; by default the devices, or physical cores.")
    ] = None,
    threads: Annotated[
        int | None, typer.Option(min=1, help="Threads a rank computes with; by default the cores over the ranks.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A third of the time, a coarser answer.")] = False,
    chip: Annotated[str | None, typer.Option(help="Chip to measure; by default the accelerator, or the CPU.")] = None,
    name: Annotated[str | None, typer.Option(help="The cluster's name; by default the architecture's.")] = None,
    rank: Annotated[
        int | None, typer.Option(min=0, help="This process is one of --ranks, started on every host of a cluster.")
    ] = None,
    store: Annotated[str, typer.Option(help="With --rank: host:port where the ranks meet; rank 0 opens it.")] = "",
    levels: Annotated[
        str, typer.Option(help="With --rank: the network from inside out, such as node:8,supernode:32,fabric:4.")
    ] = "",
    disk: Annotated[
        Path, typer.Option(help="Folder on the disk to measure; a test file is made and removed.")
    ] = Path(),
    as_json: Annotated[bool, typer.Option("--json", help="Print for machines.")] = False,
) -> None:
    """Measure this machine (peaks, memory, collectives, disk) and write it down as a cluster file."""
    if not disk.is_dir():
        _refuse(f"--disk: {disk} is not a folder")
    if output is not None and not output.parent.is_dir():
        _refuse(f"--output: the folder {output.parent} does not exist: create it first")
    from danlu.chips.measure import MeasureError

    try:
        cluster_place = _cluster_place(rank, ranks, store, levels)
        figures = _measure(chip, ranks, threads, quick, disk, cluster_place)
    except MeasureError as error:
        _refuse(str(error))
    if rank:
        return  # rank 0 tells
    cluster = _cluster(figures, name or platform.machine(), cluster_place)
    if output is not None:
        output.write_text(dumps(cluster), encoding="utf-8")
    if as_json:
        answer = {"cluster": cluster.model_dump(mode="json"), "ranks": figures.ranks.model_dump(mode="json")}
        typer.echo(json.dumps(answer, indent=2))
        return
    console = Console() if Console().is_terminal else Console(width=160)
    console.print(_table(figures, cluster))
    for figure, reason in figures.ranks.left_out.items():
        console.print(f"left out: {figure}: {reason}", style="yellow")
    console.print(f"written to {output}" if output else "nothing written: name a file with -o cluster.toml")


def _refuse(message: str) -> NoReturn:
    typer.echo(message, err=True)
    raise typer.Exit(2)


@dataclass(frozen=True)
class _ClusterPlace:
    """Where this process stands among ranks that were started on several hosts."""

    rank: int
    ranks: int
    store: str
    levels: "Fanouts"


def _cluster_place(rank: int | None, ranks: int | None, store: str, levels: str) -> _ClusterPlace | None:
    """Read the options that name a place in a cluster; all of them, or none."""
    if rank is None:
        if store or levels:
            _refuse("--store and --levels: belong to --rank, which is not given")
        return None
    if ranks is None or not store or not levels:
        _refuse("--rank: needs --ranks (how many in all), --store host:port and --levels name:count,…")
    if rank >= ranks:
        _refuse(f"--rank: must be below --ranks {ranks}, but is {rank}")
    fanouts = []
    for word in levels.split(","):
        level, _, count = word.strip().partition(":")
        if not level or not count.isdecimal() or int(count) < 1:
            _refuse(f'--levels: "{word}" must be a name and a count, such as node:8')
        fanouts.append((level, int(count)))
    return _ClusterPlace(rank, ranks, store, tuple(fanouts))


def _measure(
    chip_name: str | None,
    asked: int | None,
    threads: int | None,
    quick: bool,
    folder: Path,
    place: _ClusterPlace | None,
) -> _Figures:
    import torch

    from danlu.chips import find, host
    from danlu.chips.measure import disk_speed, memory_bandwidth
    from danlu.comm.join import Place
    from danlu.comm.measure import QUICK, THOROUGH, measure_place, measure_ranks, steps
    from danlu.framework.speed import operators

    chip = find(chip_name)
    devices = chip.runtime.device_count()
    ranks = asked or devices
    on_host = chip.runtime.device(0).type == "cpu"
    here = ranks if place is None else place.levels[0][1]
    if here > devices and not on_host:
        _refuse(f"--ranks: must be at most the {devices} devices of chip {chip.name} here, but is {here}")
    if here > devices:
        typer.echo(f"warning: {here} ranks share {devices} cores: each gets less than a core", err=True)
    load = chip.telemetry.read().get("load_per_core", 0.0) if chip.telemetry else 0.0
    if load > _QUIET:
        message = (
            f"warning: the machine is busy ({load:.1f} processes a core): figures will be too low; probe it at rest"
        )
        typer.echo(message, err=True)
    if place is None:
        _stay_on_loopback()
    with _progress() as progress:
        effort = QUICK if quick else THOROUGH
        fanouts = place.levels if place else (("node", ranks),)
        task = progress.add_task("starting ranks", total=len(steps(fanouts, effort)) + 1)
        speed = disk_speed(folder, size=(64 if quick else 256) * 2**20, seconds=0.5 if quick else 2.0)
        progress.advance(task)
        on_step = _advancing(progress, task)
        each = threads or max(1, host.physical_cores() // ranks)
        if place is None:
            figures = measure_ranks(chip.name, ranks, each, effort, on_step, operators)
        else:
            local = place.rank % place.levels[0][1]
            at = Place(rank=place.rank, world=place.ranks, local_rank=local, store=place.store)
            figures = measure_place(at, chip.name, each, effort, fanouts, on_step, operators)
    total = chip.runtime.memory_total()
    if on_host:
        return _Figures(chip, figures, speed, figures.memory_bandwidth * ranks / 2, total, total // ranks)
    return _Figures(chip, figures, speed, memory_bandwidth(torch.device("cpu")) / 2, host.memory_total(), total)


def _stay_on_loopback() -> None:
    """Let gloo, which the ranks open, listen on no interface that others can reach; the user's own choice stands."""
    loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), None)
    if loopback is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)


def _progress() -> Progress:
    columns = (TextColumn("{task.description:<18}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=Console(stderr=True), transient=True)


def _advancing(progress: Progress, task: TaskID) -> Callable[[str], None]:
    """Name each measure as it begins, and count the one before it as done."""
    begun: list[str] = []

    def on_step(name: str) -> None:
        progress.update(task, description=name, advance=1 if begun else 0)
        begun.append(name)

    return on_step


def _network(figures: "RankFigures", level: str, fanout: int) -> tuple[float, float]:
    """Bandwidth and latency of one level of the network: the median collective's between its neighbours.

    Libraries run some collectives far below others; the median is what a plan that mixes them gets.
    One rank has no network: what it would send stays in its memory.
    """
    here = [fit for fit in figures.fits if fit.level == level and fit.ranks == fanout]
    collectives = [fit for fit in here if fit.operation != "p2p"]
    if not collectives:
        return figures.memory_bandwidth, 0.0
    return statistics.median(fit.bandwidth for fit in collectives), statistics.median(fit.hop for fit in collectives)


def _level(figures: "RankFigures", name: str, fanout: int) -> Level:
    bandwidth, latency = _network(figures, name, fanout)
    return Level(
        name=name,
        fanout=fanout,
        bandwidth=_digits(bandwidth),
        latency=_digits(latency),
        collectives=tuple(_shortened(fit.curve) for fit in figures.fits if fit.level == name),
    )


def _cluster(figures: _Figures, name: str, place: _ClusterPlace | None) -> Cluster:
    ranks, disk = figures.ranks, figures.disk
    return Cluster(
        name=name,
        chip=Chip(
            name=_chip_name(figures),
            kind=figures.chip.name,
            memory=figures.chip_memory,
            memory_bandwidth=_digits(ranks.memory_bandwidth),
            peak={dtype: _digits(peak) for dtype, peak in ranks.peak.items()},
            measured=True,
            operators={dtype: _rounded(curves) for dtype, curves in ranks.operators.items()},
            alone=_digits(ranks.alone),
            spread=_digits((ranks.late - 1) / behind(ranks.ranks, 1.0)) if ranks.ranks > 1 else None,
            overlaps=figures.chip.name != "cpu",
        ),
        levels=tuple(
            _level(ranks, level, fanout) for level, fanout in (place.levels if place else (("node", ranks.ranks),))
        ),
        tiers=(
            Tier(
                name="memory",
                kind="memory",
                capacity=figures.host_memory,
                read=_digits(figures.host_copy),
                write=_digits(figures.host_copy),
            ),
            Tier(name="disk", kind="local", capacity=disk.free, read=_digits(disk.read), write=_digits(disk.write)),
        ),
        source=_source(figures),
    )


def _chip_name(figures: _Figures) -> str:
    from danlu.chips import host

    sheet = figures.chip.capabilities.chip() if figures.chip.capabilities else None
    if sheet is not None:
        return sheet.name
    return f"{host.cpu_name()}, {_threads(figures.ranks)}" if figures.chip.name == "cpu" else figures.chip.name


def _source(figures: _Figures) -> str:
    ranks = figures.ranks
    lines = [f"Measured by danlu probe: {ranks.ranks} × {_threads(ranks)}, all at work at once."]
    lines += [
        f"{fit.operation} × {fit.ranks}: {_speed(fit.bandwidth)}, {_micro(fit.latency)} a call." for fit in ranks.fits
    ]
    lines.append(f"Disk: {figures.disk.how}.")
    return "\n".join(lines)


def _table(figures: _Figures, cluster: Cluster) -> Table:
    ranks = figures.ranks
    table = Table(title=f"{cluster.chip.name}: one rank of {ranks.ranks}", title_justify="left")
    table.add_column("figure", no_wrap=True)
    table.add_column("value", justify="right", no_wrap=True)
    table.add_column("how it was measured")
    for dtype, peak in ranks.peak.items():
        how = f"best square product, {_threads(ranks)} a rank, all ranks at once"
        table.add_row(f"peak {dtype}", flops(peak), how)
    table.add_row("memory", size(cluster.chip.memory), "as the system reports it, over the ranks that share it")
    table.add_row("memory bandwidth", _speed(ranks.memory_bandwidth), "large copy, read and written bytes counted")
    if ranks.ranks > 1:
        how = "time of equal work over the mean of all ranks: what the others wait for"
        table.add_row("slowest rank", f"{ranks.late:.2f} ×", how)
    for fit in ranks.fits:
        how = f"{len(fit.sizes)} sizes to {size(fit.sizes[-1])}, line within {fit.error:.0%} of each"
        table.add_row(f"{fit.operation} × {fit.ranks}", f"{_speed(fit.bandwidth)}, {_micro(fit.latency)}", how)
    disk = figures.disk
    how = "median of the four collectives, a hop of a ring each" if ranks.fits else "one rank: no network; its memory"
    for level in cluster.levels:
        table.add_row(f"level {level.name}", f"{_speed(level.bandwidth)}, {_micro(level.latency)}", how)
    table.add_row("disk write", _speed(disk.write), disk.how)
    table.add_row("disk read", _speed(disk.read), disk.how)
    return table


def _threads(figures: "RankFigures") -> str:
    return "1 thread" if figures.threads == 1 else f"{figures.threads} threads"


def _speed(value: float) -> str:
    return f"{value / 1e9:.3g} GB/s"


def _micro(seconds: float) -> str:
    return f"{seconds * 1e6:.0f} µs"


def _digits(value: float) -> float:
    """Four digits: more than the measurement has, and a file that can be read."""
    return round(value, 3 - floor(log10(value))) if value > 0 else value


def _rounded(curves: dict[Operator, Curve]) -> dict[Operator, Curve]:
    return {operator: _shortened(curve) for operator, curve in curves.items()}


def _shortened(curve: _CurveKind) -> _CurveKind:
    return curve.model_copy(update={"seconds": tuple(map(_digits, curve.seconds))})
