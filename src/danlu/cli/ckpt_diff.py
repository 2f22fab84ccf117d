"""`danlu ckpt diff`: what two checkpoints do not share, whatever layouts wrote them."""

import json
from fnmatch import fnmatchcase
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from danlu.cli.ckpt_place import Json, Runs, Settings, find_place, growing_bar, told_plainly
from danlu.cli.ckpt_tables import apart_words, layout_words, shape_words, total_bytes
from danlu.cli.prepare import RUNS
from danlu.storage.checkpoint.compare import Apart, Difference, apart, differ
from danlu.storage.checkpoint.manifest import Manifest
from danlu.storage.checkpoint.reader import Reader

_SIDE = "RUN[@STEP]"


def diff(
    first: Annotated[str, typer.Argument(metavar=_SIDE, help="A run, a folder of checkpoints or s3://…")],
    second: Annotated[str, typer.Argument(metavar=_SIDE, help="What to hold it against.")],
    match: Annotated[str, typer.Option(metavar="PATTERN", help="Only tensors such as 'model.*'.")] = "*",
    values: Annotated[bool, typer.Option("--values", help="Read the tensors that differ, and say how far.")] = False,
    folder: Runs = RUNS,
    settings: Settings = None,
    as_json: Json = False,
) -> None:
    """Compare two checkpoints by fingerprints, without reading data; exit code 1 if they are not the same."""
    with told_plainly():
        one, two = (find_place(name, folder, settings).reader() for name in (first, second))
        found = differ(one.manifest, two.manifest, lambda name: fnmatchcase(name, match))
        distances = _distances(one, two, found.different) if values else {}
    if as_json:
        typer.echo(json.dumps(_figures(one.manifest, two.manifest, found, distances), indent=2))
    else:
        _tell(one, two, found, distances, values)
    raise typer.Exit(0 if found.none else 1)


def _distances(one: Reader, two: Reader, names: list[str]) -> dict[str, Apart]:
    total = total_bytes(one.manifest, names) + total_bytes(two.manifest, names)
    with growing_bar("values", total) as on_bytes:
        return {name: apart(one, two, name, on_bytes) for name in names}


def _tell(one: Reader, two: Reader, found: Difference, distances: dict[str, Apart], values: bool) -> None:
    console = Console(highlight=False, soft_wrap=True)
    for mark, reader in (("A", one), ("B", two)):
        console.print(f"{mark}  {escape(_side(reader))}")
    a, b = one.manifest.tensors, two.manifest.tensors
    for mark, names in (("A", found.only_first), ("B", found.only_second)):
        for name in names:
            tensor = (a if mark == "A" else b)[name]
            console.print(f"only in {mark}   {escape(name)}  {tensor.dtype} {shape_words(tensor.shape)}")
    for name in found.reshaped:
        was, now = (f"{side[name].dtype} {shape_words(side[name].shape)}" for side in (a, b))
        console.print(f"shape       {escape(name)}  {was} → {now}")
    for name in found.different:
        far = f"  {apart_words(distances[name])}" if name in distances else ""
        console.print(f"different   {escape(name)}{far}")
    for name, x, y in _other_scalars(one.manifest, two.manifest):
        console.print(f"scalar      {escape(name)}  {x!r} → {y!r}")
    shared = len(found.equal) + len(found.different)
    words = f"{len(found.equal):,} of {shared:,} shared tensors have the same bits"
    if found.different and not values:
        words += "; --values says how far the others are apart"
    console.print(words)


def _side(reader: Reader) -> str:
    manifest = reader.manifest
    return (
        f"{reader.store.name} step {manifest.step}: {len(manifest.tensors):,} tensors, {layout_words(manifest.layout)}"
    )


def _other_scalars(one: Manifest, two: Manifest) -> list[tuple[str, Any, Any]]:
    names = sorted(one.scalars.keys() | two.scalars.keys())
    pairs = [(name, one.scalars.get(name), two.scalars.get(name)) for name in names]
    return [(name, x, y) for name, x, y in pairs if x != y]


def _figures(one: Manifest, two: Manifest, found: Difference, distances: dict[str, Apart]) -> dict[str, Any]:
    return {
        "same": found.none,
        "equal": len(found.equal),
        "different": {name: vars(distances[name]) if name in distances else {} for name in found.different},
        "only_first": found.only_first,
        "only_second": found.only_second,
        "reshaped": {
            name: [[side.tensors[name].dtype, list(side.tensors[name].shape)] for side in (one, two)]
            for name in found.reshaped
        },
        "scalars": {name: [x, y] for name, x, y in _other_scalars(one, two)},
    }
