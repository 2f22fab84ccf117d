"""`danlu export hf`: a run's checkpoint as a folder that Hugging Face's tools read."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from danlu.cli.hf_result import Compare, Json, Tolerance, compare_and_report, weights_progress
from danlu.cli.run_checkpoint import RunStepArgument, open_run_checkpoint, run_problem
from danlu.cli.run_options import RunsDirOption
from danlu.spec import SpecError
from danlu.spec.custom_model import CustomModel
from danlu.spec.run_folder import DEFAULT_RUNS_DIR

app = typer.Typer(help="Export runs to formats of other tools.", no_args_is_help=True)


@app.callback()
def _export() -> None:
    pass


@app.command("hf")
def export_hf(
    run: RunStepArgument,
    output: Annotated[Path, typer.Option("--output", "-o", metavar="DIR", help="Folder to write; must be new.")],
    dtype: Annotated[Literal["fp32", "bf16"], typer.Option(help="Dtype of the weights in the files.")] = "fp32",
    folder: RunsDirOption = DEFAULT_RUNS_DIR,
    tolerance: Tolerance = None,
    compare: Compare = True,
    as_json: Json = False,
) -> None:
    """Export a run's weights as a Hugging Face model: Llama, Mistral, Qwen2, Qwen3 or Mixtral, by its architecture.

    Ends by comparing logits with transformers; exit code 1 if they differ by more than the tolerance.
    """
    import torch

    from danlu.framework import hf
    from danlu.framework.hf_compare import load_decoder
    from danlu.framework.hf_config import CONFIG_FILE
    from danlu.framework.weights import parameter_shapes

    checkpoint = open_run_checkpoint(run, folder)
    recipe = checkpoint.recipe
    if isinstance(recipe.model, CustomModel):
        message = f"trains a custom model (`{recipe.model.factory}`), whose Hugging Face family Danlu does not know"
        hint = "save it from Python: danlu.Checkpointer reads its checkpoints into any layout"
        raise SpecError([run_problem(run, message, hint)])
    model = recipe.model
    shapes = parameter_shapes(model)

    def read(parameter: str) -> torch.Tensor:
        tensor = torch.empty(shapes[parameter])
        checkpoint.fill({parameter: tensor})
        return tensor

    imported = Path(recipe.weights) if recipe.weights else None
    if imported is not None and not (missing := imported / hf.HF_CONFIG_DIR / CONFIG_FILE).is_file():
        typer.echo(f"tokenizer and other settings are not copied, because there is no {missing}", err=True)
        imported = None
    with weights_progress() as on_progress:
        family = hf.export_hf(model, read, output, imported, dtype, on_progress)
    figures = {
        "folder": str(output),
        "architecture": family.architecture,
        "run": checkpoint.run.name,
        "step": checkpoint.step,
    }
    stored = hf.EXPORT_DTYPES[dtype][1]
    raise typer.Exit(
        compare_and_report(
            figures, model, output, lambda: load_decoder(model, read, stored), tolerance, compare, as_json
        )
    )
