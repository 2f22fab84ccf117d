"""Ranks that measure together: started here, or one of those that were started on every host of a cluster."""

import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from math import floor, log10
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn, TypeVar

import typer
from rich.progress import Progress, TaskID

from danlu.comm.interfaces import address_towards, interface_of
from danlu.comm.store_token import StoreTokenError, make_token, read_token, user_token_path
from danlu.spec import TimingCurve

if TYPE_CHECKING:
    from danlu.chips import ChipDescriptor
    from danlu.comm.collective_benchmark import LevelFanouts
    from danlu.comm.rank_benchmark import BenchmarkFactory, ProbeSettings, RankMeasurements

CurveKind = TypeVar("CurveKind", bound=TimingCurve)
RankOption = Annotated[
    int | None, typer.Option(min=0, help="This process is one of --ranks, started on every host of a cluster.")
]
EndpointOption = Annotated[
    str, typer.Option("--rdzv-endpoint", help="With --rank: rendezvous endpoint host:port, served by rank 0.")
]
TokenOption = Annotated[
    Path | None,
    typer.Option(
        "--store-token", help="With --rank: file with a token that all ranks share; default: one in the home folder."
    ),
]
ThreadsOption = Annotated[int | None, typer.Option(min=1, help="Threads per rank; default: the cores over the ranks.")]
_MAX_IDLE_LOAD = 0.5
"""Runnable processes per core above which other work visibly lowers the results."""


def refuse(message: str) -> NoReturn:
    """Exit with code 2 and a message."""
    typer.echo(message, err=True)
    raise typer.Exit(2)


@dataclass(frozen=True)
class ProbeRank:
    """This process as one of the ranks started on several hosts."""

    rank: int
    ranks: int
    store: str
    token: bytes
    levels: "LevelFanouts"


def parse_fanouts(levels: str) -> "LevelFanouts":
    """The option `--levels`: name and fan-out of each level, from inside out."""
    fanouts = []
    for word in levels.split(","):
        level, _, count = word.strip().partition(":")
        if not level or not count.isdecimal() or int(count) < 1:
            refuse(f'--levels: "{word}" must be a name and a count, such as node:8')
        fanouts.append((level, int(count)))
    return tuple(fanouts)


def parse_probe_rank(
    rank: int | None, ranks: int | None, store: str, token: Path | None, levels: "LevelFanouts"
) -> ProbeRank | None:
    """Parse the options of a rank of a cluster; all of them, or none."""
    if rank is None:
        return None
    assert ranks is not None  # `cli/option_rules.py` has refused --rank without --ranks
    if rank >= ranks:
        refuse(f"--rank: must be below --ranks {ranks}, but is {rank}")
    try:
        file = token or user_token_path(os.environ)
        if token is None:
            make_token(file)
        return ProbeRank(rank, ranks, store, read_token(file), levels)
    except StoreTokenError as error:
        refuse(f"--store-token: {error}")


def check_rank_count(chip: "ChipDescriptor", here: int) -> None:
    """Refuse more ranks on this host than it has devices, and warn of what makes figures too low."""
    from danlu.chips import host

    devices = chip.runtime.device_count()
    on_host = chip.runtime.set_device(0).type == "cpu"
    if here > devices and not on_host:
        refuse(f"--ranks: must be at most the {devices} devices of chip {chip.name} here, but is {here}")
    if here > devices:
        typer.echo(f"warning: {here} ranks share {devices} cores: each gets less than a core", err=True)
    load = host.load_per_core() if on_host else 0.0
    if load > _MAX_IDLE_LOAD:
        busy = f"the machine is busy ({load:.1f} processes per core)"
        typer.echo(f"warning: {busy}: results will be too low; probe an idle machine", err=True)


def measure_ranks(
    chip: str,
    levels: "LevelFanouts",
    probe_rank: ProbeRank | None,
    threads: int,
    settings: "ProbeSettings",
    on_step: Callable[[str], None],
    operators: "BenchmarkFactory",
) -> "RankMeasurements":
    """Measure as one rank of a cluster, or start all ranks here, which the only level joins."""
    from danlu.comm.rank_benchmark import measure_as_rank, measure_local_ranks
    from danlu.comm.rendezvous import RankInfo

    if probe_rank is None:
        _listen_on(next((name for _, name in socket.if_nameindex() if name.startswith("lo")), None))
        ((level, ranks),) = levels
        return measure_local_ranks(chip, ranks, threads, settings, on_step, operators, level)
    _listen_on(_interface_towards(probe_rank.store))
    info = RankInfo(
        rank=probe_rank.rank,
        world_size=probe_rank.ranks,
        local_rank=probe_rank.rank % levels[0][1],
        endpoint=probe_rank.store,
        token=probe_rank.token,
    )
    return measure_as_rank(info, chip, threads, settings, levels, on_step, operators)


def _interface_towards(endpoint: str) -> str:
    """The interface that leads to the rendezvous: a host's name need not resolve to an address that others reach."""
    try:
        return interface_of(address_towards(endpoint))
    except (OSError, ValueError) as error:
        refuse(f'--rdzv-endpoint: "{endpoint}" must be host:port, an address that this host reaches: {error}')


def _listen_on(interface: str | None) -> None:
    """Make the ranks' gloo listen on one interface only; the user's own setting takes precedence."""
    if interface is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)


def step_callback(progress: Progress, task: TaskID) -> Callable[[str], None]:
    """Show the name of each measurement as it begins, and count the one before as done."""
    begun: list[str] = []

    def on_step(name: str) -> None:
        if begun and begun[-1] == name:
            return  # it goes on
        progress.update(task, description=name, advance=1 if begun else 0)
        begun.append(name)

    return on_step


def round_digits(value: float) -> float:
    """Four digits: more than the measurement's precision, and readable."""
    return round(value, 3 - floor(log10(value))) if value > 0 else value


def round_curve(curve: CurveKind) -> CurveKind:
    """With as many digits as the measurement has."""
    return curve.model_copy(update={"seconds": tuple(map(round_digits, curve.seconds))})
