"""`python -m danlu.cli.worker`: one training process, started by a launcher or by a scheduler's script.

Not a command of `danlu`: a rank starts sooner without importing the others.
"""

import io
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from danlu.comm.launcher_link import LauncherLink, RegroupOrder
from danlu.comm.store_token import StoreTokenError, read_token
from danlu.spec import RunFolder, SpecError, load_recipe
from danlu.spec.profile import ProfileRequest
from danlu.spec.text import printable
from danlu.storage.run_lock import RunError


def worker(
    run: Annotated[Path, typer.Argument(help="Folder of the run.")],
    rank: Annotated[int, typer.Option(min=0)],
    world: Annotated[int, typer.Option(min=1)],
    local_rank: Annotated[int, typer.Option(min=0)],
    store: Annotated[str, typer.Option(help="Rendezvous endpoint: host:port, served by rank 0; or file:PATH.")],
    store_token: Annotated[
        Path | None, typer.Option(help="File with the token of a store at host:port, readable by its owner alone.")
    ] = None,
    served: Annotated[bool, typer.Option("--served", help="The coordinator of the job serves the store.")] = False,
    locked: Annotated[bool, typer.Option("--locked", help="The launcher holds the run's lock.")] = False,
    evaluate_step: Annotated[
        int | None, typer.Option("--evaluate", help="Evaluate the checkpoint of this step instead of training.")
    ] = None,
    profile: Annotated[
        str | None, typer.Option(metavar="JSON", help="Profile these steps and ranks instead of training.")
    ] = None,
    recoverable: Annotated[
        bool, typer.Option("--recoverable", help="The launcher replaces ranks that fail; keep states in memory.")
    ] = False,
    order: Annotated[
        str | None,
        typer.Option(metavar="JSON", help="Take the place of a rank that failed, in the world of this order."),
    ] = None,
    launcher_link: Annotated[int | None, typer.Option(help="Descriptor of the link to the launcher.")] = None,
) -> None:
    """Train the run in a folder as one of its ranks."""
    sys.stdout, sys.stderr = _best_effort_stream(1), _best_effort_stream(2)
    link = LauncherLink(launcher_link)
    link.listen()
    link.report_phase("importing torch")
    from danlu.comm.rendezvous import RankInfo
    from danlu.worker import run_worker

    try:
        token = read_token(store_token) if store_token else b""
        tls = load_recipe(RunFolder(run).recipe).resilience.tls if token else None
        rank_info = RankInfo(rank, world, local_rank, store, token, served, tls)
        peaks = peak_cache_path(os.environ)
        run_worker(
            RunFolder(run),
            rank_info,
            link,
            locked=locked,
            peak_cache=peaks,
            evaluate_step=evaluate_step,
            profile=ProfileRequest.model_validate_json(profile) if profile else None,
            recoverable=recoverable,
            order=RegroupOrder.from_json(order) if order else None,
        )
        link.report_end()
    except (SpecError, RunError, StoreTokenError) as error:
        sys.stderr.write(f"{printable(str(error))}\n")
        sys.exit(2)


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


app = typer.Typer(pretty_exceptions_enable=False, add_completion=False)
app.command()(worker)

if __name__ == "__main__":
    app()
