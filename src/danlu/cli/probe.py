"""`danlu probe`: measure this machine and write it as a cluster file."""

import platform
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from danlu.cli.json_output import print_json
from danlu.cli.probe_ranks import (
    EndpointOption,
    ProbeRank,
    RankOption,
    ThreadsOption,
    TokenOption,
    check_rank_count,
    measure_ranks,
    parse_fanouts,
    parse_probe_rank,
    refuse,
    round_curve,
    round_digits,
    step_callback,
)
from danlu.cost.stragglers import slowest_chip_lag
from danlu.report.formatting import flop_rate, size
from danlu.report.progress_bar import count_bar
from danlu.report.terminal import Console
from danlu.spec import Chip, Cluster, NetworkLevel, OperatorName, SpecError, StorageTier, TimingCurve, load_cluster
from danlu.spec.toml import dumps

if TYPE_CHECKING:
    from danlu.chips import ChipDescriptor
    from danlu.chips.device_benchmark import DiskSpeed
    from danlu.comm.rank_benchmark import RankMeasurements


@dataclass(frozen=True)
class _ProbeResult:
    """All measurements."""

    chip: "ChipDescriptor"
    ranks: "RankMeasurements"
    disk: "DiskSpeed"
    host_copy: float
    """Bytes per second of copies in host memory, all ranks together."""
    host_memory: int
    chip_memory: int
    """Of one rank: its device's, or its share of the host's."""


def probe(
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write the cluster file here.")] = None,
    ranks: Annotated[
        int | None, typer.Option(min=1, help="Ranks to run at once; default: the devices, or physical cores.")
    ] = None,
    threads: ThreadsOption = None,
    quick: Annotated[bool, typer.Option("--quick", help="A third of the time, less precise.")] = False,
    chip: Annotated[str | None, typer.Option(help="Chip to measure; default: the accelerator, or the CPU.")] = None,
    name: Annotated[str | None, typer.Option(help="The cluster's name; default: the architecture.")] = None,
    rank: RankOption = None,
    store: EndpointOption = "",
    token: TokenOption = None,
    levels: Annotated[
        str, typer.Option(help="With --rank: the network from inside out, such as node:8,supernode:32,fabric:4.")
    ] = "",
    chip_from: Annotated[
        Path | None,
        typer.Option(
            "--chip-from", help="Take the chip's figures from this cluster file, and measure the network alone."
        ),
    ] = None,
    disk: Annotated[
        Path, typer.Option(help="Folder on the disk to measure; a test file is written and removed.")
    ] = Path(),
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Measure this machine (peaks, memory, collectives, disk) and write it as a cluster file."""
    if not disk.is_dir():
        refuse(f"--disk: {disk} is not a folder")
    if output is not None and not output.parent.is_dir():
        refuse(f"--output: the folder {output.parent} does not exist: create it first")
    from danlu.chips.device_benchmark import MeasurementError

    try:
        known = load_cluster(str(chip_from)) if chip_from is not None else None
    except (OSError, SpecError) as error:
        refuse(f"--chip-from: {error}")
    try:
        probe_rank = parse_probe_rank(rank, ranks, store, token, parse_fanouts(levels) if rank is not None else ())
        figures = _measure(chip, ranks, threads, quick, disk, probe_rank, with_operators=known is None)
    except MeasurementError as error:
        refuse(str(error))
    if rank:
        return  # rank 0 prints
    for fit in figures.ranks.fits:
        if fit.per_byte == 0:
            took = f"{fit.operation} × {fit.ranks} took no longer for more bytes"
            typer.echo(f"warning: {took}: its bandwidth is a lower bound; probe an idle machine", err=True)
    cluster = _cluster(figures, name or platform.machine(), probe_rank)
    if known is not None:
        if known.chip.kind != cluster.chip.kind:
            found, here = known.chip.kind, cluster.chip.kind
            refuse(f"--chip-from: {chip_from} must be of chip {here}, which was measured here, but is of {found}")
        source = f"{cluster.source}\nThe chip's figures are those of {chip_from}."
        cluster = cluster.model_copy(update={"chip": known.chip, "source": source})
    if output is not None:
        output.write_text(dumps(cluster), encoding="utf-8")
    if as_json:
        answer = {"cluster": cluster.model_dump(mode="json"), "ranks": figures.ranks.model_dump(mode="json")}
        print_json(answer)
        return
    console = Console() if Console().is_terminal else Console(width=160)
    console.print(_table(figures, cluster))
    for figure, reason in figures.ranks.left_out.items():
        console.print(f"skipped: {figure}: {reason}", style="yellow")
    console.print(f"written to {output}" if output else "nothing written: name a file with -o cluster.toml")


def _measure(
    chip_name: str | None,
    requested: int | None,
    threads: int | None,
    quick: bool,
    folder: Path,
    probe_rank: ProbeRank | None,
    *,
    with_operators: bool,
) -> _ProbeResult:
    import torch

    from danlu.chips import find_chip, host
    from danlu.chips.device_benchmark import measure_disk_speed, measure_memory_bandwidth
    from danlu.comm.rank_benchmark import (
        QUICK,
        THOROUGH,
        measurement_names,
        no_benchmarks,
    )
    from danlu.framework.operator_benchmarks import operator_benchmarks

    chip = find_chip(chip_name)
    devices = chip.runtime.device_count()
    ranks = requested or devices
    on_host = chip.runtime.set_device(0).type == "cpu"
    check_rank_count(chip, probe_rank.levels[0][1] if probe_rank else ranks)
    with count_bar() as progress:
        settings = QUICK if quick else THOROUGH
        fanouts = probe_rank.levels if probe_rank else (("node", ranks),)
        task = progress.add_task("starting ranks", total=len(measurement_names(fanouts, settings)) + 1)
        speed = measure_disk_speed(folder, size=(64 if quick else 256) * 2**20, seconds=0.5 if quick else 2.0)
        progress.advance(task)
        operators = operator_benchmarks if with_operators else no_benchmarks
        each = threads or max(1, host.physical_cores() // ranks)
        on_step = step_callback(progress, task)
        figures = measure_ranks(chip.name, fanouts, probe_rank, each, settings, on_step, operators)
    total = chip.runtime.memory_total()
    if on_host:
        return _ProbeResult(chip, figures, speed, figures.memory_bandwidth * ranks / 2, total, total // ranks)
    return _ProbeResult(
        chip, figures, speed, measure_memory_bandwidth(torch.device("cpu")) / 2, host.memory_total(), total
    )


def _network(figures: "RankMeasurements", level: str, fanout: int) -> tuple[float, float]:
    """Bandwidth and latency of one level of the network: the median over collectives between its neighbors.

    Libraries run some collectives far slower than others; the median is what a plan that mixes them gets.
    One rank has no network: what it would send stays in its memory.
    """
    here = [fit for fit in figures.fits if fit.level == level and fit.ranks == fanout]
    collectives = [fit for fit in here if fit.operation != "p2p"]
    if not collectives:
        return figures.memory_bandwidth, 0.0
    return statistics.median(fit.bus_bandwidth for fit in collectives), statistics.median(
        fit.hop_latency for fit in collectives
    )


def _level(figures: "RankMeasurements", name: str, fanout: int) -> NetworkLevel:
    bandwidth, latency = _network(figures, name, fanout)
    return NetworkLevel(
        name=name,
        fanout=fanout,
        bandwidth=round_digits(bandwidth),
        latency=round_digits(latency),
        collectives=tuple(round_curve(fit.cluster_entry) for fit in figures.fits if fit.level == name),
    )


def _cluster(figures: _ProbeResult, name: str, probe_rank: ProbeRank | None) -> Cluster:
    ranks, disk = figures.ranks, figures.disk
    return Cluster(
        name=name,
        chip=Chip(
            name=_chip_name(figures),
            kind=figures.chip.name,
            memory=figures.chip_memory,
            memory_bandwidth=round_digits(ranks.memory_bandwidth),
            peak={dtype: round_digits(peak) for dtype, peak in ranks.peak.items()},
            measured=True,
            operators={dtype: _rounded(curves) for dtype, curves in ranks.operators.items()},
            alone=round_digits(ranks.alone),
            spread=round_digits((ranks.late - 1) / slowest_chip_lag(ranks.ranks, 1.0)) if ranks.ranks > 1 else None,
            overlaps=figures.chip.name != "cpu",
        ),
        levels=tuple(
            _level(ranks, level, fanout)
            for level, fanout in (probe_rank.levels if probe_rank else (("node", ranks.ranks),))
        ),
        tiers=(
            StorageTier(
                name="memory",
                kind="memory",
                capacity=figures.host_memory,
                read=round_digits(figures.host_copy),
                write=round_digits(figures.host_copy),
            ),
            StorageTier(
                name="disk",
                kind="local",
                capacity=disk.free,
                read=round_digits(disk.read),
                write=round_digits(disk.write),
            ),
        ),
        source=_source(figures),
    )


def _chip_name(figures: _ProbeResult) -> str:
    name = figures.chip.runtime.device_name()
    return f"{name}, {_format_threads(figures.ranks)}" if figures.chip.name == "cpu" else name


def _source(figures: _ProbeResult) -> str:
    ranks = figures.ranks
    lines = [f"Measured by danlu probe: {ranks.ranks} × {_format_threads(ranks)}, all working at once."]
    lines += [
        f"{fit.operation} × {fit.ranks}: "
        f"{_format_bandwidth(fit.bus_bandwidth)}, {_format_microseconds(fit.latency)} per call."
        for fit in ranks.fits
    ]
    lines.append(f"Disk: {figures.disk.method}.")
    return "\n".join(lines)


def _table(figures: _ProbeResult, cluster: Cluster) -> Table:
    ranks = figures.ranks
    table = Table(title=f"{cluster.chip.name}: one rank of {ranks.ranks}", title_justify="left")
    table.add_column("figure", no_wrap=True)
    table.add_column("value", justify="right", no_wrap=True)
    table.add_column("how it was measured")
    for dtype, peak in ranks.peak.items():
        how = f"best square matmul, {_format_threads(ranks)} per rank, all ranks at once"
        table.add_row(f"peak {dtype}", flop_rate(peak), how)
    table.add_row("memory", size(cluster.chip.memory), "as the system reports it, over the ranks that share it")
    table.add_row(
        "memory bandwidth", _format_bandwidth(ranks.memory_bandwidth), "large copy, read and written bytes counted"
    )
    if ranks.ranks > 1:
        how = "time for work that all begin at once, over that of the operators: the others wait for it"
        table.add_row("slowest rank", f"{ranks.late:.2f} ×", how)
    for fit in ranks.fits:
        how = f"{len(fit.sizes)} sizes to {size(fit.sizes[-1])}, fit within {fit.error:.0%} of each"
        table.add_row(
            f"{fit.operation} × {fit.ranks}",
            f"{_format_bandwidth(fit.bus_bandwidth)}, {_format_microseconds(fit.latency)}",
            how,
        )
    disk = figures.disk
    how = "median of the four collectives, per ring step" if ranks.fits else "one rank: no network; its memory"
    for level in cluster.levels:
        table.add_row(
            f"level {level.name}", f"{_format_bandwidth(level.bandwidth)}, {_format_microseconds(level.latency)}", how
        )
    table.add_row("disk write", _format_bandwidth(disk.write), disk.method)
    table.add_row("disk read", _format_bandwidth(disk.read), disk.method)
    return table


def _format_threads(figures: "RankMeasurements") -> str:
    return "1 thread" if figures.threads == 1 else f"{figures.threads} threads"


def _format_bandwidth(value: float) -> str:
    return f"{value / 1e9:.3g} GB/s"


def _format_microseconds(seconds: float) -> str:
    return f"{seconds * 1e6:.0f} µs"


def _rounded(curves: dict[OperatorName, TimingCurve]) -> dict[OperatorName, TimingCurve]:
    return {operator: round_curve(curve) for operator, curve in curves.items()}
