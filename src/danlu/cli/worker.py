"""`danlu worker`: one training process, started by `danlu train` or by a scheduler's script."""

import io
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from danlu.comm.launcher_link import LauncherLink
from danlu.spec import RunFolder, SpecError


def worker(
    run: Annotated[Path, typer.Argument(help="Folder of the run.")],
    rank: Annotated[int, typer.Option(min=0)],
    world: Annotated[int, typer.Option(min=1)],
    local_rank: Annotated[int, typer.Option(min=0)],
    store: Annotated[str, typer.Option(help="Rendezvous endpoint: host:port, served by rank 0; or file:PATH.")],
    locked: Annotated[bool, typer.Option("--locked", help="The launcher holds the run's lock.")] = False,
    launcher_link: Annotated[int | None, typer.Option(help="Descriptor of the link to the launcher.")] = None,
) -> None:
    """Train the run in a folder as one of its ranks."""
    sys.stdout, sys.stderr = _best_effort_stream(1), _best_effort_stream(2)
    link = LauncherLink(launcher_link)
    link.stop_when_launcher_exits()
    link.report_phase("importing torch")
    from danlu.comm.rendezvous import RankInfo
    from danlu.worker import format_failure, run_worker

    rank_info = RankInfo(rank=rank, world_size=world, local_rank=local_rank, endpoint=store)
    try:
        run_worker(RunFolder(run), rank_info, link, locked=locked, peak_cache=peak_cache_path(os.environ))
    except SpecError as error:  # printed without a traceback by `main`
        sys.stderr.write(f"{format_failure(rank, error)}\n")
        raise


def peak_cache_path(environment: Mapping[str, str]) -> Path | None:
    """The peak cache in the user's cache folder; None if the environment has neither a cache nor a home."""
    base = environment.get("XDG_CACHE_HOME") or (f"{home}/.cache" if (home := environment.get("HOME")) else "")
    return Path(base) / "danlu" / "peaks.json" if Path(base).is_absolute() else None


class _BestEffortFile(io.FileIO):
    """Ignores write errors of a full disk: losing log lines is better than losing the run."""

    def write(self, data: "bytes | bytearray | memoryview") -> int:  # type: ignore[override]
        try:
            return super().write(data) or len(data)
        except OSError:
            return len(data)


def _best_effort_stream(descriptor: int) -> io.TextIOWrapper:
    """A standard stream that ignores write errors."""
    raw = _BestEffortFile(descriptor, "w", closefd=False)
    buffered = io.BufferedWriter(raw)  # type: ignore[type-var]
    return io.TextIOWrapper(buffered, "utf-8", "backslashreplace", line_buffering=True)
