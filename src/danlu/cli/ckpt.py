"""`danlu ckpt`: look at checkpoints, check, compare, copy and delete them. Needs no accelerator and no torch."""

import json
from fnmatch import fnmatchcase
from typing import Annotated

import typer
from rich.console import Console

from danlu.cli.ckpt_diff import diff
from danlu.cli.ckpt_place import (
    Json,
    Place,
    Runs,
    Settings,
    bytes_bar,
    fail,
    find_place,
    growing_bar,
    told_plainly,
)
from danlu.cli.ckpt_tables import entries_table, entry_figures, facts_table, tensor_figures, tensors_table
from danlu.cli.prepare import RUNS
from danlu.report import wording
from danlu.storage.checkpoint.copying import Copied, copy
from danlu.storage.checkpoint.inventory import Entry, Verdict, tree_of, verify
from danlu.storage.checkpoint.mending import Mending, mend
from danlu.storage.checkpoint.shelf import Shelf

app = typer.Typer(help="Checkpoints: of a run, in a folder, or in an object store.", no_args_is_help=True)
app.command()(diff)

Where = Annotated[
    str, typer.Argument(metavar="RUN[@STEP]", help="A run, a folder of checkpoints or s3://…; @STEP names one of them.")
]


def wide_console() -> Console:
    """Where tables are printed; a file or a pipe has no width of its own, so it gets every column."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=200)


@app.command()
def ls(where: Where, folder: Runs = RUNS, settings: Settings = None, as_json: Json = False) -> None:
    """List the checkpoints of a run: state, size, who wrote them and when."""
    with told_plainly():
        place = find_place(where, folder, settings)
        entries = place.entries() if place.step is None else [place.entry()]
    if as_json:
        typer.echo(json.dumps([entry_figures(entry) for entry in entries], indent=2))
        return
    wide_console().print(entries_table(entries))
    for entry in entries:
        if entry.trouble:
            typer.echo(f"step {entry.step}: {entry.trouble}", err=True)


@app.command("verify")
def verify_(
    where: Where,
    every: Annotated[bool, typer.Option("--all", help="Every complete checkpoint, not only one.")] = False,
    folder: Runs = RUNS,
    settings: Settings = None,
    as_json: Json = False,
) -> None:
    """Read every chunk and hold it against its hash; exit code 1 if anything is damaged."""
    with told_plainly():
        place = find_place(where, folder, settings)
        if every and place.step is not None:
            fail("--all verifies every step: leave @STEP out")
        entries = place.entries() if every else [place.entry()]
        if every:  # what was set aside or given up counts for no run
            entries = [entry for entry in entries if entry.state in ("complete", "damaged")]
        verdicts = [_verified(place, entry) for entry in entries]
    if as_json:
        typer.echo(json.dumps([_verdict_figures(verdict) for verdict in verdicts], indent=2))
    else:
        for verdict in verdicts:
            _tell_verdict(place, verdict)
    raise typer.Exit(1 if any(verdict.faults or verdict.mendable for verdict in verdicts) else 0)


def _verified(place: Place, entry: Entry) -> Verdict:
    if entry.state in ("quarantined", "incomplete"):
        fail(f"{place.label}@{entry.step} is {entry.state}: there is no manifest to hold it against")
    with bytes_bar(f"step {entry.step}") as on_bytes:
        return verify(place.store, entry.step, on_bytes)


def _tell_verdict(place: Place, verdict: Verdict) -> None:
    name = f"{place.label}@{verdict.step}"
    for line in verdict.mendable:
        typer.echo(f"  damaged, but can be mended: {line}")
    if verdict.mendable and not verdict.faults:
        typer.echo(f"{name}: damaged in {len(verdict.mendable):,} places, but nothing is lost")
        typer.echo(f"    → danlu ckpt mend {name}")
        return
    if not verdict.faults:
        typer.echo(
            f"{name}: good: {verdict.tensors:,} tensors, {verdict.chunks:,} chunks, {wording.size(verdict.bytes)},"
            " every one as it was written"
        )
        return
    files = len({fault.file for fault in verdict.faults})
    typer.echo(f"{name}: DAMAGED in {len(verdict.faults):,} places of {files:,} files")
    for fault in verdict.faults:
        typer.echo(f"  {fault.tensor or 'all tensors'}: {fault.message}")


def _verdict_figures(verdict: Verdict) -> dict[str, object]:
    return {
        "step": verdict.step,
        "good": not verdict.faults and not verdict.mendable,
        "tensors": verdict.tensors,
        "chunks": verdict.chunks,
        "bytes": verdict.bytes,
        "faults": [vars(fault) for fault in verdict.faults],
        "mendable": verdict.mendable,
    }


@app.command("mend")
def mend_(where: Where, folder: Runs = RUNS, settings: Settings = None, as_json: Json = False) -> None:
    """Write damaged files anew from second copies and parity; exit code 1 if something stays damaged.

    Needs checkpoints that were saved with `checkpoint.parity`. Nothing is guessed: what is written has the hashes that
    were taken while training.
    """
    with told_plainly():
        place = find_place(where, folder, settings)
        entry = place.entry()
        if entry.manifest is None:
            fail(f"{place.label}@{entry.step} is {entry.state}: there is no manifest to hold it against")
        with growing_bar(f"step {entry.step}", entry.manifest.bytes) as on_bytes:
            mending = mend(place.store, entry.step, on_bytes)
    if as_json:
        typer.echo(
            json.dumps({"step": mending.step, "mended": mending.mended, "left": [vars(each) for each in mending.left]})
        )
    else:
        _tell_mending(f"{place.label}@{entry.step}", mending)
    raise typer.Exit(1 if mending.left else 0)


def _tell_mending(name: str, mending: Mending) -> None:
    for path in mending.mended:
        typer.echo(f"  written anew: {path}")
    for fault in mending.left:
        typer.echo(f"  stays damaged: {fault.tensor or 'all tensors'}: {fault.message}")
    if mending.left:
        typer.echo(f"{name}: {len(mending.left):,} places stay DAMAGED; take an older checkpoint, or a copy")
    elif mending.mended:
        typer.echo(f"{name}: mended, {len(mending.mended):,} files written anew, every one as it was")
    else:
        typer.echo(f"{name}: good, nothing had to be mended")


@app.command()
def show(
    where: Where,
    match: Annotated[str, typer.Option(metavar="PATTERN", help="Only tensors such as 'model.blocks.0.*'.")] = "*",
    chunks: Annotated[bool, typer.Option("--chunks", help="List the chunks of every tensor too.")] = False,
    folder: Runs = RUNS,
    settings: Settings = None,
    as_json: Json = False,
) -> None:
    """Show what one checkpoint holds: scalars, layout, tree, and every tensor with its fingerprint."""
    with told_plainly():
        place = find_place(where, folder, settings)
        reader = place.reader()
        tree = tree_of(reader)
    manifest = reader.manifest
    tensors = {name: tensor for name, tensor in manifest.tensors.items() if fnmatchcase(name, match)}
    if not tensors and manifest.tensors:
        fail(f'no tensor of {place.label}@{manifest.step} matches "{match}"; the first is {min(manifest.tensors)}')
    if as_json:
        shown = {n: tensor_figures(t, tree.chunks.get(n, []) if chunks else None) for n, t in sorted(tensors.items())}
        shape = {"levels": tree.levels, "nodes": tree.nodes, "leaves": tree.leaves, "packs": tree.packs}
        figures = {
            "step": manifest.step,
            "attempt": manifest.attempt,
            "scalars": manifest.scalars,
            "layout": manifest.layout,
            "written": manifest.written,
            "finite": manifest.finite,
            "root": manifest.root,
            "tree": shape,
            "tensors": shown,
        }
        typer.echo(json.dumps(figures, indent=2))
        return
    console = wide_console()
    console.print(facts_table(f"{place.label}@{manifest.step}", manifest, tree))
    console.print()
    console.print(tensors_table(tensors, tree, chunks=chunks))


@app.command()
def rm(
    where: Where,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Even the newest that a run could go on from.")] = False,
    folder: Runs = RUNS,
    settings: Settings = None,
) -> None:
    """Delete one checkpoint, its manifest first; what a save left behind can be deleted too."""
    with told_plainly():
        place = find_place(where, folder, settings)
        if place.step is None:
            fail(f"name the step to delete: {place.label}@STEP")
        entry = place.entry()
        newest = max(Shelf(place.store, keep=1).steps(), default=None)
        if entry.step == newest and not force:
            fail(
                f"{place.label}@{entry.step} is the newest that a run can go on from; it stays\n"
                "    → --force, if it is to go all the same"
            )
        size = wording.size(entry.manifest.bytes) if entry.manifest else "unknown size"
        if not yes and not typer.confirm(f"delete {place.label}@{entry.step} ({entry.state}, {size})?"):
            typer.echo("nothing was deleted")
            raise typer.Exit(1)
        Shelf(place.store, keep=1).remove(entry.step)
    typer.echo(f"deleted {place.label}@{entry.step}")


@app.command("copy")
def copy_(
    source: Where,
    target: Annotated[str, typer.Argument(metavar="TO", help="A folder, s3://… or a run to copy into.")],
    folder: Runs = RUNS,
    settings: Settings = None,
    as_json: Json = False,
) -> None:
    """Copy checkpoints to another folder or store; every chunk is checked on the way, the manifest comes last.

    All complete ones, or the one of @STEP. A copy that was cut off goes on where it stopped.
    """
    with told_plainly():
        place, goal = find_place(source, folder, settings), find_place(target, folder, settings, new=True)
        if goal.step is not None:
            fail(f"a checkpoint keeps its step: copy to {goal.label}")
        entries = [place.entry()] if place.step is not None else place.entries()
        chosen = [entry for entry in entries if entry.state == "complete"]
        if not chosen:
            fail(f"{source}: no checkpoint is complete, so there is nothing to copy")
        copied = [_copied(place, goal, entry) for entry in chosen]
    if as_json:
        typer.echo(json.dumps([vars(each) for each in copied], indent=2))
        return
    for each in copied:
        typer.echo(_copied_line(place, goal, each))


def _copied(place: Place, goal: Place, entry: Entry) -> Copied:
    assert entry.manifest is not None
    with growing_bar(f"step {entry.step}", entry.manifest.bytes) as on_bytes:
        return copy(place.store, goal.store, entry.step, on_bytes)


def _copied_line(place: Place, goal: Place, copied: Copied) -> str:
    name = f"{place.label}@{copied.step} → {goal.store.name}"
    if copied.complete_before:
        return f"{name}: was there already, the same to the root hash"
    there = f", {copied.there:,} were there already" if copied.there else ""
    return f"{name}: {copied.files:,} packs, {wording.size(copied.bytes)} copied, every chunk checked{there}"
