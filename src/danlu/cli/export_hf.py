"""`danlu export hf`: a run's checkpoint as a folder that Hugging Face's tools read."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from danlu.cli.hf_outcome import Compare, Json, Tolerance, compare_and_tell, weights_progress
from danlu.cli.prepare import RUNS
from danlu.report.runs import find_run
from danlu.spec import Problem, SpecError, load_recipe
from danlu.spec.own_model import OwnModel
from danlu.spec.problem import nearest, problem_at

app = typer.Typer(help="Runs into other tools' forms.", no_args_is_help=True)


@app.callback()
def _export() -> None:
    pass


@app.command("hf")
def export_hf(
    run: Annotated[str, typer.Argument(metavar="RUN[@STEP]", help="A run; its newest checkpoint, or that of STEP.")],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="DIR", help="Folder to write; must be new.")],
    dtype: Annotated[Literal["fp32", "bf16"], typer.Option(help="Dtype of the weights in the files.")] = "fp32",
    folder: Annotated[Path, typer.Option(help="Folder that holds the runs.")] = RUNS,
    tolerance: Tolerance = None,
    compare: Compare = True,
    as_json: Json = False,
) -> None:
    """Export a run's weights as a Hugging Face model: Llama, Mistral, Qwen2, Qwen3 or Mixtral, by its traits.

    Ends by comparing logits with transformers; exit code 1 if they differ by more than the tolerance.
    """
    import torch

    from danlu.framework import hf
    from danlu.framework.hf_compare import read_decoder
    from danlu.framework.hf_config import CONFIG
    from danlu.framework.weights import parameter_shapes
    from danlu.storage.checkpoint.checkpoints import open_checkpoints
    from danlu.storage.checkpoint.home import home_of

    name, step = step_of(run)
    found = find_run(name, folder)
    recipe = load_recipe(found.recipe)
    if isinstance(recipe.model, OwnModel):
        message = f"trains a module of its own (`{recipe.model.factory}`), whose families Danlu does not know"
        hint = "save it from Python: danlu.Checkpointer reads its checkpoints into any layout"
        raise SpecError([_run_problem(run, message, hint)])
    model = recipe.model
    where, options = home_of(found, recipe.checkpoint)
    checkpoints = open_checkpoints(where, recipe.checkpoint.keep, torch.device("cpu"), options=options)
    chosen = choose_step(name, step, checkpoints.shelf.steps())
    shapes = parameter_shapes(model)

    def read(parameter: str) -> torch.Tensor:
        tensor = torch.empty(shapes[parameter])
        checkpoints.read(chosen, {f"model.{parameter}": tensor})
        return tensor

    imported = Path(recipe.weights) if recipe.weights else None
    if imported is not None and not (missing := imported / hf.ORIGINAL / CONFIG).is_file():
        typer.echo(f"tokenizer and other settings are not carried along, because there is no {missing}", err=True)
        imported = None
    with weights_progress() as on_progress:
        family = hf.export_hf(model, read, output, imported, dtype, on_progress)
    figures = {"folder": str(output), "architecture": family.architecture, "run": found.name, "step": chosen}
    stored = hf.EXPORT_DTYPES[dtype][1]
    raise typer.Exit(
        compare_and_tell(figures, model, output, lambda: read_decoder(model, read, stored), tolerance, compare, as_json)
    )


def step_of(text: str) -> tuple[str, int | None]:
    """`RUN@STEP` into its two parts; the newest step if none is named."""
    name, at, step = text.rpartition("@")
    if not at:
        return text, None
    if not step.isdigit():
        raise SpecError([_run_problem(text, f'has "{step}" for its step', f"{name}@100, or {name} for the newest")])
    return name, int(step)


def choose_step(run: str, step: int | None, complete: list[int]) -> int:
    """The step that was asked for, or the newest; one that was not saved is an error that names those that were."""
    if not complete:
        raise SpecError([_run_problem(run, "has no complete checkpoint", "let it train to one")])
    if step is not None and step not in complete:
        hint = nearest(str(step), [str(saved) for saved in complete])
        raise SpecError([_run_problem(run, f"has no checkpoint of step {step}; saved are {complete}", hint)])
    return complete[-1] if step is None else step


def _run_problem(run: str, message: str, suggestion: str) -> Problem:
    return problem_at(Path(run), 1, "run", message, suggestion)
