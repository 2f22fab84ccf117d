"""`danlu import dcp`, `megatron`, `safetensors`: import checkpoints of other systems into Danlu's format."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from danlu.cli.ckpt_ref import S3Option, fail, incremental_progress_bar, report_errors, resolve_ref
from danlu.report import formatting
from danlu.spec.run_folder import DEFAULT_RUNS_DIR
from danlu.storage.checkpoint.boxes import numel
from danlu.storage.checkpoint.commit import CheckpointSaveError
from danlu.storage.checkpoint.foreign.dcp import SourceCheckpoint, open_dcp
from danlu.storage.checkpoint.foreign.megatron import open_megatron
from danlu.storage.checkpoint.foreign.safe_pickle import CheckpointImportError
from danlu.storage.checkpoint.foreign.safetensors_files import open_safetensors
from danlu.storage.checkpoint.single_writer import write_checkpoint

_MAX_LISTED = 5
_NUMBER = re.compile(r"([0-9]+)$")

SourceArgument = Annotated[Path, typer.Argument(metavar="DIR", help="Folder to read.", exists=True)]
OutputOption = Annotated[
    str, typer.Option("--output", "-o", metavar="OUT", help="Folder of checkpoints, or s3://…, to write into.")
]
StepOption = Annotated[
    int | None, typer.Option(min=0, help="Step of the checkpoint; default: the number at the end of the folder's name.")
]


def import_dcp(
    folder: SourceArgument, output: OutputOption, step: StepOption = None, settings: S3Option = None
) -> None:
    """Import a folder of PyTorch's distributed checkpoint; pickles are read as data, nothing in them is executed."""
    _import(folder, output, step, settings, open_dcp, "dcp")


def import_megatron(
    folder: SourceArgument, output: OutputOption, step: StepOption = None, settings: S3Option = None
) -> None:
    """Import a folder of Megatron's torch_dist format, such as iter_0000100; names do not change."""
    _import(folder, output, step, settings, open_megatron, "megatron")


def import_safetensors(
    folder: SourceArgument, output: OutputOption, step: StepOption = None, settings: S3Option = None
) -> None:
    """Import a safetensors file, or a folder of them with or without an index."""
    _import(folder, output, step, settings, open_safetensors, "safetensors")


def _import(
    source: Path,
    output: str,
    step: int | None,
    settings: list[str] | None,
    open_source: Callable[[Path], SourceCheckpoint],
    kind: str,
) -> None:
    with report_errors():
        target = resolve_ref(output, DEFAULT_RUNS_DIR, settings, new=True)
        if target.step is not None:
            fail(f"give the step with --step {target.step}, and the folder without it: -o {target.label}")
        number = step if step is not None else _step_in(source)
        try:
            found = open_source(source)
            if not found.tensors:
                fail(f"{source} holds no tensor, so there is nothing to import")
            with incremental_progress_bar("tensors", found.bytes) as on_bytes:
                manifest = write_checkpoint(target.store, number, found.tensors, {"imported": kind}, on_bytes)
        except (CheckpointImportError, CheckpointSaveError) as error:
            fail(str(error))
    skipped = found.skipped + [f"{t.name}: it has no elements" for t in found.tensors if not numel(t.shape)]
    for line in skipped[:_MAX_LISTED]:
        typer.echo(f"not imported: {line}", err=True)
    if len(skipped) > _MAX_LISTED:
        typer.echo(f"not imported: {len(skipped) - _MAX_LISTED} more", err=True)
    typer.echo(
        f"{source} → {target.store.name} step {number}: {len(manifest.tensors):,} tensors, "
        f"{formatting.size(manifest.bytes)}{'' if manifest.finite else ', not all finite'}"
    )


def _step_in(source: Path) -> int:
    found = _NUMBER.search(source.resolve().name)
    if found is None:
        fail(f'"{source.resolve().name}" does not end with a number; give the step with --step')
    return int(found[1])
