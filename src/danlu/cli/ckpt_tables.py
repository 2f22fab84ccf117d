"""What `danlu ckpt` prints: tables for people, plain values for machines."""

from datetime import datetime
from typing import Any

from rich.markup import escape
from rich.table import Table

from danlu.report import wording
from danlu.storage.checkpoint.compare import Apart
from danlu.storage.checkpoint.inventory import Entry, Tree
from danlu.storage.checkpoint.manifest import Manifest, Sum

SHORT = 12
"""Digits of a root hash that a table shows."""
_STYLE = {"complete": "green", "quarantined": "yellow", "incomplete": "dim", "damaged": "red"}


def layout_words(layout: dict[str, int]) -> str:
    """Axes with more than one rank: `shard 2 · tp 4`."""
    wide = [f"{axis} {degree}" for axis, degree in layout.items() if degree > 1]
    return " · ".join(wide) or "1 rank"


def moment_words(moment: float) -> str:
    """A time of this place."""
    return datetime.fromtimestamp(moment).astimezone().strftime("%Y-%m-%d %H:%M:%S")


def entry_figures(entry: Entry) -> dict[str, Any]:
    """One step's folder for machines."""
    figures: dict[str, Any] = {"step": entry.step, "state": entry.state, "leftovers": entry.leftovers}
    if entry.trouble:
        figures["trouble"] = entry.trouble
    if (manifest := entry.manifest) is not None:
        figures |= {
            "tensors": len(manifest.tensors),
            "bytes": manifest.bytes,
            "writers": manifest.packs,
            "layout": manifest.layout,
            "written": manifest.written,
            "finite": manifest.finite,
            "root": manifest.root,
        }
    return figures


def entries_table(entries: list[Entry]) -> Table:
    """One row a step."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title, justify in (
        ("step", "right"), ("state", "left"), ("tensors", "right"), ("bytes", "right"), ("ranks", "right"),
        ("layout", "left"), ("written", "left"), ("finite", "left"), ("root", "left"),
    ):  # fmt: skip
        table.add_column(title, justify="right" if justify == "right" else "left", no_wrap=title != "state")
    for entry in entries:
        state = f"[{_STYLE[entry.state]}]{entry.state}[/]"
        if entry.leftovers:
            state += f" [dim]({entry.leftovers} leftover file{'s' * (entry.leftovers > 1)})[/]"
        table.add_row(f"{entry.step:,}", state, *_entry_row(entry.manifest))
    return table


def _entry_row(manifest: Manifest | None) -> list[str]:
    if manifest is None:
        return [wording.MISSING] * 7
    return [
        f"{len(manifest.tensors):,}",
        wording.size(manifest.bytes),
        f"{manifest.packs:,}",
        escape(layout_words(manifest.layout)),
        moment_words(manifest.written),
        "yes" if manifest.finite else "[red]no[/]",
        manifest.root[:SHORT],
    ]


def facts_table(place: str, manifest: Manifest, tree: Tree) -> Table:
    """A checkpoint's own figures, its scalars and the shape of its tree."""
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="dim")
    table.add_column(overflow="fold")
    scalars = ", ".join(f"{name} = {value!r}" for name, value in sorted(manifest.scalars.items()))
    rows = {
        "checkpoint": f"[bold]{escape(place)}[/]",
        "scalars": escape(scalars) or wording.MISSING,
        "layout": f"{escape(layout_words(manifest.layout))}, {_many(manifest.packs, 'writer')}",
        "written": moment_words(manifest.written),
        "finite": "yes" if manifest.finite else "[red]no[/]",
        "tensors": f"{len(manifest.tensors):,}, {wording.size(manifest.bytes)} in packs",
        "tree": f"{tree.levels} level{'s' * (tree.levels > 1)}: the manifest, {_many(tree.nodes, 'node')}, "
        f"{_many(tree.leaves, 'leaf', 'leaves')}, {_many(tree.packs, 'pack')}, "
        f"{_many(sum(map(len, tree.chunks.values())), 'chunk')}",
        "root": manifest.root,
    }
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def _many(count: int, one: str, several: str = "") -> str:
    return f"{count:,} {one if count == 1 else several or one + 's'}"


def tensors_table(tensors: dict[str, Sum], tree: Tree, *, chunks: bool) -> Table:
    """One row a tensor, and with `chunks` one a chunk under it."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title, right in (("tensor", 0), ("dtype", 0), ("shape", 0), ("bytes", 1), ("chunks", 1), ("fingerprint", 0)):
        table.add_column(title, justify="right" if right else "left", overflow="fold")
    for name, tensor in sorted(tensors.items()):
        pieces = tree.chunks.get(name, [])
        table.add_row(
            escape(name),
            tensor.dtype,
            shape_words(tensor.shape),
            wording.size(tensor.nbytes(tensor.shape)),
            f"{len(pieces):,}",
            f"{tensor.fingerprint:016x}",
        )
        for box, pack, at in pieces if chunks else ():
            table.add_row(f"[dim]  {escape(box)}[/]", "", "", "", "", f"[dim]{pack} from byte {at:,}[/]")
    return table


def tensor_figures(tensor: Sum, pieces: list[tuple[str, str, int]] | None) -> dict[str, Any]:
    """One tensor for machines."""
    figures: dict[str, Any] = {
        "dtype": tensor.dtype,
        "shape": list(tensor.shape),
        "bytes": tensor.nbytes(tensor.shape),
        "fingerprint": f"{tensor.fingerprint:016x}",
    }
    if pieces is not None:
        figures["chunks"] = [{"box": box, "pack": pack, "at": at} for box, pack, at in pieces]
    return figures


def shape_words(shape: tuple[int, ...]) -> str:
    """A shape with × between its sides; a scalar says so."""
    return " × ".join(map(str, shape)) if shape else "scalar"


def apart_words(apart: Apart) -> str:
    """How far two tensors are apart, in a line."""
    if apart.first is None:
        return "no element differs"
    share = wording.percent(apart.differing / apart.elements)
    words = f"max |Δ| {apart.largest:.3g}, {apart.differing:,} of {apart.elements:,} elements ({share})"
    words += f", first at {list(apart.first)}"
    return words + (f", {apart.not_finite:,} not finite" if apart.not_finite else "")


def total_bytes(manifest: Manifest, names: list[str]) -> int:
    """Bytes of these tensors."""
    return sum(manifest.tensors[name].nbytes(manifest.tensors[name].shape) for name in names)
