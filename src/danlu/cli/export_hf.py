"""`danlu export hf`: a run's checkpoint as a folder that Hugging Face's tools read."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from danlu.cli.hf_result import Compare, Json, Tolerance, compare_and_report, weights_progress
from danlu.cli.run_options import RunsDirOption
from danlu.report.run_tables import find_run
from danlu.spec import Problem, SpecError, load_recipe
from danlu.spec.custom_model import CustomModel
from danlu.spec.problem import problem_at, suggest_name
from danlu.spec.run_folder import DEFAULT_RUNS_DIR

app = typer.Typer(help="Export runs to formats of other tools.", no_args_is_help=True)


@app.callback()
def _export() -> None:
    pass


@app.command("hf")
def export_hf(
    run: Annotated[str, typer.Argument(metavar="RUN[@STEP]", help="A run; its newest checkpoint, or that of STEP.")],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="DIR", help="Folder to write; must be new.")],
    dtype: Annotated[Literal["fp32", "bf16"], typer.Option(help="Dtype of the weights in the files.")] = "fp32",
    ema: Annotated[bool, typer.Option("--ema", help="The average of the weights (`[ema]`), not the weights.")] = False,
    folder: RunsDirOption = DEFAULT_RUNS_DIR,
    tolerance: Tolerance = None,
    compare: Compare = True,
    as_json: Json = False,
) -> None:
    """Export a run's weights as a Hugging Face model: Llama, Mistral, Qwen2, Qwen3 or Mixtral, by its architecture.

    Ends by comparing logits with transformers; exit code 1 if they differ by more than the tolerance.
    """
    import torch

    from danlu.comm.world import World
    from danlu.framework import hf
    from danlu.framework.hf_compare import load_decoder
    from danlu.framework.hf_config import CONFIG_FILE
    from danlu.framework.weights import parameter_shapes
    from danlu.storage.checkpoint.engine import open_checkpoint_engine
    from danlu.storage.checkpoint.run_store import run_store_location

    name, step = parse_run_step(run)
    found = find_run(name, folder)
    recipe = load_recipe(found.recipe)
    if isinstance(recipe.model, CustomModel):
        message = f"trains a custom model (`{recipe.model.factory}`), whose Hugging Face family Danlu does not know"
        hint = "save it from Python: danlu.Checkpointer reads its checkpoints into any layout"
        raise SpecError([_run_problem(run, message, hint)])
    if ema and recipe.ema is None:
        raise SpecError([_run_problem(run, "keeps no average of its weights", "omit --ema; a run needs a table [ema]")])
    model, prefix = recipe.model, "ema" if ema else "model"
    where, options = run_store_location(found, recipe.checkpoint)
    checkpoints = open_checkpoint_engine(where, recipe.checkpoint.keep, World(), options=options)
    chosen = choose_step(name, step, checkpoints.checkpoint_dir.resumable_steps())
    shapes = parameter_shapes(model)

    def read(parameter: str) -> torch.Tensor:
        tensor = torch.empty(shapes[parameter])
        checkpoints.load_full(chosen, {f"{prefix}.{parameter}": tensor})
        return tensor

    imported = Path(recipe.weights) if recipe.weights else None
    if imported is not None and not (missing := imported / hf.HF_CONFIG_DIR / CONFIG_FILE).is_file():
        typer.echo(f"tokenizer and other settings are not copied, because there is no {missing}", err=True)
        imported = None
    with weights_progress() as on_progress:
        family = hf.export_hf(model, read, output, imported, dtype, on_progress)
    figures = {"folder": str(output), "architecture": family.architecture, "run": found.name, "step": chosen}
    stored = hf.EXPORT_DTYPES[dtype][1]
    raise typer.Exit(
        compare_and_report(
            figures, model, output, lambda: load_decoder(model, read, stored), tolerance, compare, as_json
        )
    )


def parse_run_step(text: str) -> tuple[str, int | None]:
    """Split `RUN@STEP`; None for the newest step."""
    name, at, step = text.rpartition("@")
    if not at:
        return text, None
    if not step.isdigit():
        raise SpecError([_run_problem(text, f'has "{step}" for its step', f"{name}@100, or {name} for the newest")])
    return name, int(step)


def choose_step(run: str, step: int | None, complete: list[int]) -> int:
    """The requested step, or the newest; the error for an unsaved step lists the saved ones."""
    if not complete:
        raise SpecError([_run_problem(run, "has no complete checkpoint", "let it train to one")])
    if step is not None and step not in complete:
        hint = suggest_name(str(step), [str(saved) for saved in complete])
        raise SpecError([_run_problem(run, f"has no checkpoint of step {step}; saved are {complete}", hint)])
    return complete[-1] if step is None else step


def _run_problem(run: str, message: str, suggestion: str) -> Problem:
    return problem_at(Path(run), 1, "run", message, suggestion)
