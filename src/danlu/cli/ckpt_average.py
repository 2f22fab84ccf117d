"""`danlu ckpt average`: the mean of a run's checkpoints, as a run that can be exported and sampled."""

import re
import shutil
from pathlib import Path
from typing import Annotated

import typer

from danlu.cli.ckpt_ref import JsonOption, fail, incremental_progress_bar, report_errors
from danlu.cli.json_output import print_json
from danlu.cli.run_options import RunsDirOption
from danlu.report import formatting
from danlu.report.run_tables import find_run
from danlu.spec import RunFolder, load_recipe
from danlu.spec.model import Model
from danlu.spec.run_folder import DEFAULT_RUNS_DIR
from danlu.spec.toml import dumps
from danlu.storage.checkpoint.average import (
    MODEL_PREFIX,
    CheckpointsDifferError,
    average_checkpoints,
    bytes_to_read,
)
from danlu.storage.checkpoint.checkpoint_dir import CheckpointDir
from danlu.storage.checkpoint.run_store import open_run_store
from danlu.storage.store.base import open_store

_RANGE = re.compile(r"^(?P<run>.+)@(?P<first>[0-9]+)\.\.(?P<last>[0-9]+)$")


def average(
    where: Annotated[
        str, typer.Argument(metavar="RUN@FIRST..LAST", help="A run and two steps: all checkpoints from FIRST to LAST.")
    ],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="DIR", help="Run folder to write; must be new.")],
    ema: Annotated[bool, typer.Option("--ema", help="Average the run's moving averages, not its weights.")] = False,
    folder: RunsDirOption = DEFAULT_RUNS_DIR,
    as_json: JsonOption = False,
) -> None:
    """Average the weights of several checkpoints into a new run folder.

    `danlu export hf`, `danlu ckpt` and `weights` in a recipe take the folder as they take a run.
    """
    asked = _RANGE.match(where)
    if asked is None:
        fail(f"{where}: name a run and two steps, such as {where.partition('@')[0]}@100..200")
    run, first, last = find_run(asked["run"], folder), int(asked["first"]), int(asked["last"])
    store = open_run_store(run)
    saved = CheckpointDir(store, keep=1).resumable_steps()
    steps = [step for step in saved if first <= step <= last]
    if len(steps) < 2:
        fail(
            f"{where}: an average needs at least 2 checkpoints from {first} to {last}, but there are {len(steps)}; "
            f"saved are {', '.join(map(str, saved)) or 'none'}\n"
            "    → keep more of them with `checkpoint.keep`, or name other steps"
        )
    if output.exists():
        fail(f"{output} must be new, but exists already; it is not changed")
    prefix = "ema." if ema else MODEL_PREFIX
    partial = output.with_name(f".{output.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        with report_errors():
            total = bytes_to_read(store, steps, prefix)
            with incremental_progress_bar(f"{len(steps)} checkpoints", total) as on_bytes:
                target = open_store(str(RunFolder(partial).checkpoints))
                manifest = average_checkpoints(store, steps, target, prefix, on_bytes)
        _write_descriptions(run, RunFolder(partial))
        partial.rename(output)
    except CheckpointsDifferError as error:
        fail(str(error))
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    if as_json:
        figures = {"folder": str(output), "step": manifest.step, "steps": steps, "bytes": manifest.bytes}
        print_json(figures)
        return
    size = formatting.size(manifest.bytes)
    typer.echo(f"{output}: mean of {len(steps)} checkpoints ({', '.join(map(str, steps))}), {size}")
    typer.echo(f"    → danlu export hf {output} -o DIR, or `weights` in a recipe")


def _write_descriptions(run: RunFolder, made: RunFolder) -> None:
    """The run's recipe, whose checkpoints are in this folder, and its model for `weights`."""
    recipe = load_recipe(run.recipe)
    local = recipe.checkpoint.model_copy(update={"store": "", "options": {}})
    made.recipe.write_text(dumps(recipe.model_copy(update={"checkpoint": local})), encoding="utf-8")
    if isinstance(recipe.model, Model):
        (made.path / "model.toml").write_text(dumps(recipe.model), encoding="utf-8")
