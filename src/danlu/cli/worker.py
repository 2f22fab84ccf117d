"""`danlu worker`: one training process, started by `danlu train` or by a scheduler's script."""

from pathlib import Path
from typing import Annotated

import typer

from danlu.spec import RunFolder


def worker(
    run: Annotated[Path, typer.Argument(help="Folder of the run.")],
    rank: Annotated[int, typer.Option(min=0)],
    world: Annotated[int, typer.Option(min=1)],
    local_rank: Annotated[int, typer.Option(min=0)],
    store: Annotated[str, typer.Option(help="host:port where the ranks meet; rank 0 opens it.")],
) -> None:
    """Train the run in a folder as one of its ranks."""
    from danlu.comm.join import Place
    from danlu.worker import run_worker

    run_worker(RunFolder(run), Place(rank=rank, world=world, local_rank=local_rank, store=store))
