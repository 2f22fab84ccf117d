"""The checkpoint that `RUN[@STEP]` names, for commands that read a run's weights in one process."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from danlu.report.run_tables import find_run
from danlu.spec import Problem, Recipe, RunFolder, SpecError, load_recipe
from danlu.spec.problem import problem_at, suggest_name

if TYPE_CHECKING:
    from torch import Tensor

    from danlu.storage.checkpoint.engine import CheckpointEngine

RunStepArgument = Annotated[
    str, typer.Argument(metavar="RUN[@STEP]", help="A run; its newest checkpoint, or that of STEP.")
]


@dataclass(frozen=True)
class RunCheckpoint:
    """A complete checkpoint of a run, whatever layout saved it."""

    run: RunFolder
    recipe: Recipe
    step: int
    engine: "CheckpointEngine"

    def fill(self, tensors: "Mapping[str, Tensor]", kind: str = "model") -> None:
        """Fill full tensors in place, by their names in the model; every one is verified.

        `kind` is `ema` for the average of the parameters.
        """
        self.engine.load_full(self.step, {f"{kind}.{name}": tensor for name, tensor in tensors.items()})


def open_run_checkpoint(text: str, runs: Path) -> RunCheckpoint:
    """The run and the checkpoint that `RUN[@STEP]` names; each thing that does not exist is an error that says so."""
    from danlu.comm.world import World
    from danlu.storage.checkpoint.engine import open_checkpoint_engine
    from danlu.storage.checkpoint.run_store import run_store_location

    name, step = parse_run_step(text)
    run = find_run(name, runs)
    recipe = load_recipe(run.recipe)
    where, options = run_store_location(run, recipe.checkpoint)
    engine = open_checkpoint_engine(where, recipe.checkpoint.keep, World(), options=options)
    return RunCheckpoint(run, recipe, choose_step(name, step, engine.checkpoint_dir.resumable_steps()), engine)


def parse_run_step(text: str) -> tuple[str, int | None]:
    """Split `RUN@STEP`; None for the newest step."""
    name, at, step = text.rpartition("@")
    if not at:
        return text, None
    if not step.isdigit():
        raise SpecError([run_problem(text, f'has "{step}" for its step', f"{name}@100, or {name} for the newest")])
    return name, int(step)


def choose_step(run: str, step: int | None, complete: list[int]) -> int:
    """The requested step, or the newest; the error for an unsaved step lists the saved ones."""
    if not complete:
        raise SpecError([run_problem(run, "has no complete checkpoint", "let it train to one")])
    if step is not None and step not in complete:
        hint = suggest_name(str(step), [str(saved) for saved in complete])
        raise SpecError([run_problem(run, f"has no checkpoint of step {step}; saved are {complete}", hint)])
    return complete[-1] if step is None else step


def run_problem(run: str, message: str, suggestion: str) -> Problem:
    """A problem with the argument `RUN[@STEP]`."""
    return problem_at(Path(run), 1, "run", message, suggestion)
