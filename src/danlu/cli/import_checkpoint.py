"""`danlu import dcp`, `megatron`, `safetensors`: checkpoints of other systems into Danlu's format."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from danlu.cli.ckpt_place import Settings, fail, find_place, growing_bar, told_plainly
from danlu.cli.prepare import RUNS
from danlu.report import wording
from danlu.storage.checkpoint.boxes import volume
from danlu.storage.checkpoint.commit import SaveFailed
from danlu.storage.checkpoint.single import write_single
from danlu.storage.foreign.dcp import Found, open_dcp
from danlu.storage.foreign.megatron import open_megatron
from danlu.storage.foreign.pickled import Refused
from danlu.storage.foreign.safetensors_files import open_safetensors

_TOLD = 5
_NUMBER = re.compile(r"([0-9]+)$")

Source = Annotated[Path, typer.Argument(metavar="DIR", help="Folder to read.", exists=True)]
Output = Annotated[
    str, typer.Option("--output", "-o", metavar="OUT", help="Folder of checkpoints, or s3://…, to write into.")
]
Step = Annotated[
    int | None, typer.Option(min=0, help="Step to call it; the number at the end of the folder's name if left out.")
]


def import_dcp(folder: Source, output: Output, step: Step = None, settings: Settings = None) -> None:
    """Import a folder of PyTorch's distributed checkpoint; its pickles are read as data, nothing in them is run."""
    _import(folder, output, step, settings, open_dcp, "dcp")


def import_megatron(folder: Source, output: Output, step: Step = None, settings: Settings = None) -> None:
    """Import a folder of Megatron's torch_dist format, such as iter_0000100; names stay as they are."""
    _import(folder, output, step, settings, open_megatron, "megatron")


def import_safetensors(folder: Source, output: Output, step: Step = None, settings: Settings = None) -> None:
    """Import a safetensors file, or a folder of them with or without an index."""
    _import(folder, output, step, settings, open_safetensors, "safetensors")


def _import(
    source: Path,
    output: str,
    step: int | None,
    settings: list[str] | None,
    open_source: Callable[[Path], Found],
    kind: str,
) -> None:
    with told_plainly():
        goal = find_place(output, RUNS, settings, new=True)
        if goal.step is not None:
            fail(f"say the step with --step {goal.step}, and the folder without it: -o {goal.label}")
        number = step if step is not None else _step_in(source)
        try:
            found = open_source(source)
            if not found.tensors:
                fail(f"{source} holds no tensor, so there is nothing to import")
            with growing_bar("tensors", found.bytes) as on_bytes:
                manifest = write_single(goal.store, number, found.tensors, {"imported": kind}, on_bytes)
        except (Refused, SaveFailed) as error:
            fail(str(error))
    left_out = found.left_out + [f"{t.name}: it has no element" for t in found.tensors if not volume(t.shape)]
    for line in left_out[:_TOLD]:
        typer.echo(f"not carried over: {line}", err=True)
    if len(left_out) > _TOLD:
        typer.echo(f"not carried over: {len(left_out) - _TOLD} more", err=True)
    typer.echo(
        f"{source} → {goal.store.name} step {number}: {len(manifest.tensors):,} tensors, "
        f"{wording.size(manifest.bytes)}{'' if manifest.finite else ', not all finite'}"
    )


def _step_in(source: Path) -> int:
    found = _NUMBER.search(source.resolve().name)
    if found is None:
        fail(f'"{source.resolve().name}" does not end with a number; say which step it is with --step')
    return int(found[1])
