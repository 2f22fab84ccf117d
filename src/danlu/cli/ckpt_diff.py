"""`danlu ckpt diff`: the differences of two checkpoints, whatever layouts wrote them."""

from fnmatch import fnmatchcase
from typing import Annotated, Any

import typer
from rich.markup import escape

from danlu.cli.ckpt_ref import (
    JsonOption,
    S3Option,
    incremental_progress_bar,
    report_errors,
    resolve_ref,
)
from danlu.cli.ckpt_tables import format_axes, format_scalar, format_shape, format_tensor_diff, total_bytes
from danlu.cli.json_output import print_json
from danlu.cli.run_options import RunsDirOption
from danlu.report.terminal import Console
from danlu.spec.run_folder import DEFAULT_RUNS_DIR
from danlu.storage.checkpoint.compare import CheckpointDiff, TensorDiff, compare_manifests, compare_tensor
from danlu.storage.checkpoint.manifest import Manifest
from danlu.storage.checkpoint.reader import CheckpointReader

_SIDE = "RUN[@STEP]"


def diff(
    first: Annotated[str, typer.Argument(metavar=_SIDE, help="A run, a folder of checkpoints or s3://…")],
    second: Annotated[str, typer.Argument(metavar=_SIDE, help="What to compare it with.")],
    match: Annotated[str, typer.Option(metavar="PATTERN", help="Only tensors such as 'model.*'.")] = "*",
    values: Annotated[
        bool, typer.Option("--values", help="Read the tensors that differ, and print the size of the differences.")
    ] = False,
    folder: RunsDirOption = DEFAULT_RUNS_DIR,
    settings: S3Option = None,
    as_json: JsonOption = False,
) -> None:
    """Compare two checkpoints by fingerprints, without reading data; exit code 1 if they are not the same."""
    with report_errors():
        one, two = (resolve_ref(name, folder, settings).open_reader() for name in (first, second))
        found = compare_manifests(one.manifest, two.manifest, lambda name: fnmatchcase(name, match))
        distances = _tensor_diffs(one, two, found.different) if values else {}
    if as_json:
        print_json(_diff_json(one.manifest, two.manifest, found, distances))
    else:
        _print_diff(one, two, found, distances, values)
    raise typer.Exit(0 if found.is_empty else 1)


def _tensor_diffs(one: CheckpointReader, two: CheckpointReader, names: list[str]) -> dict[str, TensorDiff]:
    total = total_bytes(one.manifest, names) + total_bytes(two.manifest, names)
    with incremental_progress_bar("values", total) as on_bytes:
        return {name: compare_tensor(one, two, name, on_bytes) for name in names}


def _print_diff(
    one: CheckpointReader, two: CheckpointReader, found: CheckpointDiff, distances: dict[str, TensorDiff], values: bool
) -> None:
    console = Console(highlight=False, soft_wrap=True)
    for mark, reader in (("A", one), ("B", two)):
        console.print(f"{mark}  {escape(_side(reader))}")
    a, b = one.manifest.tensors, two.manifest.tensors
    for mark, names in (("A", found.only_first), ("B", found.only_second)):
        for name in names:
            tensor = (a if mark == "A" else b)[name]
            console.print(f"only in {mark}   {escape(name)}  {tensor.dtype} {format_shape(tensor.shape)}")
    for name in found.reshaped:
        was, now = (f"{side[name].dtype} {format_shape(side[name].shape)}" for side in (a, b))
        console.print(f"shape       {escape(name)}  {was} → {now}")
    for name in found.different:
        size = f"  {format_tensor_diff(distances[name])}" if name in distances else ""
        console.print(f"different   {escape(name)}{size}")
    for name, x, y in _changed_scalars(one.manifest, two.manifest):
        console.print(f"scalar      {escape(name)}  {escape(format_scalar(x))} → {escape(format_scalar(y))}")
    shared = len(found.equal) + len(found.different)
    summary = f"{len(found.equal):,} of {shared:,} shared tensors have the same bits"
    if found.different and not values:
        summary += "; use --values for the size of the differences"
    console.print(summary)


def _side(reader: CheckpointReader) -> str:
    manifest = reader.manifest
    return (
        f"{reader.store.name} step {manifest.step}: {len(manifest.tensors):,} tensors, {format_axes(manifest.layout)}"
    )


def _changed_scalars(one: Manifest, two: Manifest) -> list[tuple[str, Any, Any]]:
    names = sorted(one.scalars.keys() | two.scalars.keys())
    pairs = [(name, one.scalars.get(name), two.scalars.get(name)) for name in names]
    return [(name, x, y) for name, x, y in pairs if x != y]


def _diff_json(one: Manifest, two: Manifest, found: CheckpointDiff, distances: dict[str, TensorDiff]) -> dict[str, Any]:
    return {
        "same": found.is_empty,
        "equal": len(found.equal),
        "different": {name: vars(distances[name]) if name in distances else {} for name in found.different},
        "only_first": found.only_first,
        "only_second": found.only_second,
        "reshaped": {
            name: [[side.tensors[name].dtype, list(side.tensors[name].shape)] for side in (one, two)]
            for name in found.reshaped
        },
        "scalars": {name: [x, y] for name, x, y in _changed_scalars(one, two)},
    }
