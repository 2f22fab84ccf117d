"""Output of `danlu ckpt`: tables for people, JSON values for machines."""

from datetime import datetime
from typing import Any

from rich.markup import escape
from rich.table import Table

from danlu.report import formatting
from danlu.storage.checkpoint.compare import TensorDiff
from danlu.storage.checkpoint.inspection import CheckpointEntry, TreeStats
from danlu.storage.checkpoint.manifest import Manifest, TensorSummary

HASH_DIGITS = 12
"""Digits of a root hash in a table."""
MAX_SCALAR_LENGTH = 60
"""Characters of a scalar that are shown."""
_STYLE = {"complete": "green", "quarantined": "yellow", "incomplete": "dim", "damaged": "red"}


def format_axes(layout: dict[str, int]) -> str:
    """Axes with more than one rank: `shard 2 · tp 4`."""
    wide = [f"{axis} {degree}" for axis, degree in layout.items() if degree > 1]
    return " · ".join(wide) or "1 rank"


def format_timestamp(moment: float) -> str:
    """A time in the local time zone."""
    return datetime.fromtimestamp(moment).astimezone().strftime("%Y-%m-%d %H:%M:%S")


def entry_json(entry: CheckpointEntry) -> dict[str, Any]:
    """One step's folder for machines."""
    figures: dict[str, Any] = {"step": entry.step, "state": entry.state, "leftovers": entry.leftover_files}
    if entry.error:
        figures["trouble"] = entry.error
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


def entries_table(entries: list[CheckpointEntry]) -> Table:
    """One row per step."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title, justify in (
        ("step", "right"), ("state", "left"), ("tensors", "right"), ("bytes", "right"), ("ranks", "right"),
        ("layout", "left"), ("written", "left"), ("finite", "left"), ("root", "left"),
    ):  # fmt: skip
        table.add_column(title, justify="right" if justify == "right" else "left", no_wrap=title != "state")
    for entry in entries:
        state = f"[{_STYLE[entry.state]}]{entry.state}[/]"
        if entry.leftover_files:
            state += f" [dim]({entry.leftover_files} leftover file{'s' * (entry.leftover_files > 1)})[/]"
        table.add_row(f"{entry.step:,}", state, *_entry_row(entry.manifest))
    return table


def _entry_row(manifest: Manifest | None) -> list[str]:
    if manifest is None:
        return [formatting.MISSING] * 7
    return [
        f"{len(manifest.tensors):,}",
        formatting.size(manifest.bytes),
        f"{manifest.packs:,}",
        escape(format_axes(manifest.layout)),
        format_timestamp(manifest.written),
        "yes" if manifest.finite else "[red]no[/]",
        manifest.root[:HASH_DIGITS],
    ]


def manifest_table(label: str, manifest: Manifest, tree: TreeStats) -> Table:
    """The fields of a manifest, and the shape of its tree."""
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="dim")
    table.add_column(overflow="fold")
    scalars = ", ".join(f"{name} = {format_scalar(value)}" for name, value in sorted(manifest.scalars.items()))
    rows = {
        "checkpoint": f"[bold]{escape(label)}[/]",
        "scalars": escape(scalars) or formatting.MISSING,
        "layout": f"{escape(format_axes(manifest.layout))}, {_pluralize(manifest.packs, 'writer')}",
        "written": format_timestamp(manifest.written),
        "finite": "yes" if manifest.finite else "[red]no[/]",
        "tensors": f"{len(manifest.tensors):,}, {formatting.size(manifest.bytes)} in packs",
        "tree": f"{tree.levels} level{'s' * (tree.levels > 1)}: the manifest, {_pluralize(tree.nodes, 'node')}, "
        f"{_pluralize(tree.leaves, 'leaf', 'leaves')}, {_pluralize(tree.packs, 'pack')}, "
        f"{_pluralize(sum(map(len, tree.chunks.values())), 'chunk')}",
        "root": manifest.root,
    }
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def format_scalar(value: object) -> str:
    """A scalar of a checkpoint; a long text, such as the statistics of the spike guard, is cut."""
    text = repr(value)
    return text if len(text) <= MAX_SCALAR_LENGTH else f"{text[: MAX_SCALAR_LENGTH - 1]}…"


def _pluralize(count: int, one: str, several: str = "") -> str:
    return f"{count:,} {one if count == 1 else several or one + 's'}"


def tensors_table(tensors: dict[str, TensorSummary], tree: TreeStats, *, chunks: bool) -> Table:
    """One row per tensor, and with `chunks` one per chunk below it."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title, right in (("tensor", 0), ("dtype", 0), ("shape", 0), ("bytes", 1), ("chunks", 1), ("fingerprint", 0)):
        table.add_column(title, justify="right" if right else "left", overflow="fold")
    for name, tensor in sorted(tensors.items()):
        pieces = tree.chunks.get(name, [])
        table.add_row(
            escape(name),
            tensor.dtype,
            format_shape(tensor.shape),
            formatting.size(tensor.nbytes(tensor.shape)),
            f"{len(pieces):,}",
            f"{tensor.fingerprint:016x}",
        )
        for box, pack, at in pieces if chunks else ():
            table.add_row(f"[dim]  {escape(box)}[/]", "", "", "", "", f"[dim]{pack} from byte {at:,}[/]")
    return table


def tensor_json(tensor: TensorSummary, pieces: list[tuple[str, str, int]] | None) -> dict[str, Any]:
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


def format_shape(shape: tuple[int, ...]) -> str:
    """A shape with × between its sizes, or "scalar"."""
    return " × ".join(map(str, shape)) if shape else "scalar"


def format_tensor_diff(diff: TensorDiff) -> str:
    """The differences of two tensors, in one line."""
    if diff.first is None:
        return "no element differs"
    share = formatting.percent(diff.differing / diff.elements)
    text = f"max |Δ| {diff.largest:.3g}, {diff.differing:,} of {diff.elements:,} elements ({share})"
    text += f", first at {list(diff.first)}"
    return text + (f", {diff.not_finite:,} not finite" if diff.not_finite else "")


def total_bytes(manifest: Manifest, names: list[str]) -> int:
    """Bytes of these tensors."""
    return sum(manifest.tensors[name].nbytes(manifest.tensors[name].shape) for name in names)
