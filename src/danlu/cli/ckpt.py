"""`danlu ckpt`: list, show, verify, compare, copy and delete checkpoints. Needs no accelerator and no torch."""

from fnmatch import fnmatchcase
from typing import Annotated

import typer

from danlu.cli.ckpt_average import average
from danlu.cli.ckpt_diff import diff
from danlu.cli.ckpt_ref import (
    CheckpointRef,
    JsonOption,
    S3Option,
    fail,
    incremental_progress_bar,
    report_errors,
    resolve_ref,
)
from danlu.cli.ckpt_tables import entries_table, entry_json, manifest_table, tensor_json, tensors_table
from danlu.cli.json_output import print_json
from danlu.cli.run_options import RunsDirOption
from danlu.report import formatting
from danlu.report.progress_bar import progress_bar
from danlu.report.terminal import Console
from danlu.spec.run_folder import DEFAULT_RUNS_DIR
from danlu.storage.checkpoint.checkpoint_dir import CheckpointDir
from danlu.storage.checkpoint.copying import CopyResult, copy_checkpoint
from danlu.storage.checkpoint.inspection import CheckpointEntry, VerifyResult, tree_stats, verify
from danlu.storage.checkpoint.repair import RepairResult, repair

app = typer.Typer(help="Checkpoints: of a run, in a folder, or in an object store.", no_args_is_help=True)
app.command()(diff)
app.command()(average)

RefArgument = Annotated[
    str,
    typer.Argument(metavar="RUN[@STEP]", help="A run, a folder of checkpoints or s3://…; @STEP selects one of them."),
]


def wide_console() -> Console:
    """The console for tables; a file or a pipe has no width, so it gets every column."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=200)


@app.command()
def ls(
    where: RefArgument,
    folder: RunsDirOption = DEFAULT_RUNS_DIR,
    settings: S3Option = None,
    as_json: JsonOption = False,
) -> None:
    """List the checkpoints of a run: state, size, layout and time."""
    with report_errors():
        ref = resolve_ref(where, folder, settings)
        entries = ref.entries() if ref.step is None else [ref.entry()]
    if as_json:
        print_json([entry_json(entry) for entry in entries])
        return
    wide_console().print(entries_table(entries))
    for entry in entries:
        if entry.error:
            typer.echo(f"step {entry.step}: {entry.error}", err=True)


@app.command("verify")
def verify_command(
    where: RefArgument,
    every: Annotated[bool, typer.Option("--all", help="Every complete checkpoint, not only one.")] = False,
    folder: RunsDirOption = DEFAULT_RUNS_DIR,
    settings: S3Option = None,
    as_json: JsonOption = False,
) -> None:
    """Read every chunk and verify its checksum; exit code 1 if anything is corrupt."""
    with report_errors():
        ref = resolve_ref(where, folder, settings)
        if every and ref.step is not None:
            fail("--all verifies every step: omit @STEP")
        entries = ref.entries() if every else [ref.entry()]
        if every:  # no run resumes from quarantined or incomplete ones
            entries = [entry for entry in entries if entry.state in ("complete", "damaged")]
        results = [_verify_with_progress(ref, entry) for entry in entries]
    if as_json:
        print_json([_verify_json(result) for result in results])
    else:
        for result in results:
            _print_verify_result(ref, result)
    raise typer.Exit(1 if any(result.faults or result.mendable for result in results) else 0)


def _verify_with_progress(ref: CheckpointRef, entry: CheckpointEntry) -> VerifyResult:
    if entry.state in ("quarantined", "incomplete"):
        fail(f"{ref.label}@{entry.step} is {entry.state}: it has no manifest to verify against")
    with progress_bar(f"step {entry.step}") as on_bytes:
        return verify(ref.store, entry.step, on_bytes)


def _print_verify_result(ref: CheckpointRef, result: VerifyResult) -> None:
    name = f"{ref.label}@{result.step}"
    for line in result.mendable:
        typer.echo(f"  corrupt, repairable: {line}")
    if result.mendable and not result.faults:
        typer.echo(f"{name}: {len(result.mendable):,} corrupt places, all repairable")
        typer.echo(f"    → danlu ckpt repair {name}")
        return
    if not result.faults:
        typer.echo(
            f"{name}: intact: {result.tensors:,} tensors, {result.chunks:,} chunks,"
            f" {formatting.size(result.bytes)}, all checksums match"
        )
        return
    files = len({fault.file for fault in result.faults})
    typer.echo(f"{name}: CORRUPT in {len(result.faults):,} places of {files:,} files")
    for fault in result.faults:
        typer.echo(f"  {fault.tensor or 'all tensors'}: {fault.message}")


def _verify_json(result: VerifyResult) -> dict[str, object]:
    return {
        "step": result.step,
        "good": not result.faults and not result.mendable,
        "tensors": result.tensors,
        "chunks": result.chunks,
        "bytes": result.bytes,
        "faults": [vars(fault) for fault in result.faults],
        "mendable": result.mendable,
    }


@app.command("repair")
def repair_command(
    where: RefArgument,
    folder: RunsDirOption = DEFAULT_RUNS_DIR,
    settings: S3Option = None,
    as_json: JsonOption = False,
) -> None:
    """Repair corrupt files from replicas and parity; exit code 1 if something stays corrupt.

    Needs checkpoints that were saved with `checkpoint.parity`. Everything written has the checksums taken while
    training.
    """
    with report_errors():
        ref = resolve_ref(where, folder, settings)
        entry = ref.entry()
        if entry.manifest is None:
            fail(f"{ref.label}@{entry.step} is {entry.state}: it has no manifest to verify against")
        with incremental_progress_bar(f"step {entry.step}", entry.manifest.bytes) as on_bytes:
            result = repair(ref.store, entry.step, on_bytes)
    if as_json:
        print_json(
            {"step": result.step, "mended": result.mended, "left": [vars(each) for each in result.left]}, indent=None
        )
    else:
        _print_repair_result(f"{ref.label}@{entry.step}", result)
    raise typer.Exit(1 if result.left else 0)


def _print_repair_result(name: str, result: RepairResult) -> None:
    for path in result.mended:
        typer.echo(f"  rewritten: {path}")
    for fault in result.left:
        typer.echo(f"  still corrupt: {fault.tensor or 'all tensors'}: {fault.message}")
    if result.left:
        typer.echo(f"{name}: {len(result.left):,} places are still CORRUPT; use an older checkpoint, or a copy")
    elif result.mended:
        typer.echo(f"{name}: repaired, {len(result.mended):,} files rewritten")
    else:
        typer.echo(f"{name}: intact, nothing to repair")


@app.command()
def show(
    where: RefArgument,
    match: Annotated[str, typer.Option(metavar="PATTERN", help="Only tensors such as 'model.blocks.0.*'.")] = "*",
    chunks: Annotated[bool, typer.Option("--chunks", help="List the chunks of every tensor too.")] = False,
    folder: RunsDirOption = DEFAULT_RUNS_DIR,
    settings: S3Option = None,
    as_json: JsonOption = False,
) -> None:
    """Show what one checkpoint holds: scalars, layout, tree, and every tensor with its fingerprint."""
    with report_errors():
        ref = resolve_ref(where, folder, settings)
        reader = ref.open_reader()
        tree = tree_stats(reader)
    manifest = reader.manifest
    tensors = {name: tensor for name, tensor in manifest.tensors.items() if fnmatchcase(name, match)}
    if not tensors and manifest.tensors:
        fail(f'no tensor of {ref.label}@{manifest.step} matches "{match}"; the first is {min(manifest.tensors)}')
    if as_json:
        shown = {n: tensor_json(t, tree.chunks.get(n, []) if chunks else None) for n, t in sorted(tensors.items())}
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
        print_json(figures)
        return
    console = wide_console()
    console.print(manifest_table(f"{ref.label}@{manifest.step}", manifest, tree))
    console.print()
    console.print(tensors_table(tensors, tree, chunks=chunks))


@app.command()
def rm(
    where: RefArgument,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Even the newest checkpoint a run can resume from.")] = False,
    folder: RunsDirOption = DEFAULT_RUNS_DIR,
    settings: S3Option = None,
) -> None:
    """Delete one checkpoint, its manifest first; leftovers of a save can be deleted too."""
    with report_errors():
        ref = resolve_ref(where, folder, settings)
        if ref.step is None:
            fail(f"give the step to delete: {ref.label}@STEP")
        entry = ref.entry()
        newest = max(CheckpointDir(ref.store, keep=1).resumable_steps(), default=None)
        if entry.step == newest and not force:
            fail(
                f"{ref.label}@{entry.step} is the newest checkpoint a run can resume from; it was not deleted\n"
                "    → pass --force to delete it anyway"
            )
        size = formatting.size(entry.manifest.bytes) if entry.manifest else "unknown size"
        if not yes and not typer.confirm(f"delete {ref.label}@{entry.step} ({entry.state}, {size})?"):
            typer.echo("nothing was deleted")
            raise typer.Exit(1)
        CheckpointDir(ref.store, keep=1).remove(entry.step)
    typer.echo(f"deleted {ref.label}@{entry.step}")


@app.command("copy")
def copy_command(
    source: RefArgument,
    target: Annotated[str, typer.Argument(metavar="TO", help="A folder, s3://… or a run to copy into.")],
    folder: RunsDirOption = DEFAULT_RUNS_DIR,
    settings: S3Option = None,
    as_json: JsonOption = False,
) -> None:
    """Copy checkpoints to another folder or store; every chunk is verified on the way, the manifest is written last.

    All complete ones, or the one of @STEP. An interrupted copy is resumed.
    """
    with report_errors():
        ref, target_ref = resolve_ref(source, folder, settings), resolve_ref(target, folder, settings, new=True)
        if target_ref.step is not None:
            fail(f"a checkpoint keeps its step: copy to {target_ref.label}")
        entries = [ref.entry()] if ref.step is not None else ref.entries()
        chosen = [entry for entry in entries if entry.state == "complete"]
        if not chosen:
            fail(f"{source}: no checkpoint is complete, so there is nothing to copy")
        copied = [_copy_with_progress(ref, target_ref, entry) for entry in chosen]
    if as_json:
        print_json([vars(each) for each in copied])
        return
    for each in copied:
        typer.echo(_copy_line(ref, target_ref, each))


def _copy_with_progress(ref: CheckpointRef, target_ref: CheckpointRef, entry: CheckpointEntry) -> CopyResult:
    assert entry.manifest is not None
    with incremental_progress_bar(f"step {entry.step}", entry.manifest.bytes) as on_bytes:
        return copy_checkpoint(ref.store, target_ref.store, entry.step, on_bytes)


def _copy_line(ref: CheckpointRef, target_ref: CheckpointRef, copied: CopyResult) -> str:
    name = f"{ref.label}@{copied.step} → {target_ref.store.name}"
    if copied.complete_before:
        parity = f", the parity of {copied.parity_groups:,} groups is new" if copied.parity_groups else ""
        return f"{name}: already there, with the same root hash{parity}"
    there = f", {copied.there:,} already there" if copied.there else ""
    return f"{name}: {copied.files:,} packs, {formatting.size(copied.bytes)} copied, every chunk verified{there}"
