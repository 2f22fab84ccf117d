"""`danlu export hf`: a run's checkpoint as a folder that Hugging Face's tools read."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from danlu.cli.hf_result import Compare, Json, Tolerance, compare_and_report, weights_progress
from danlu.cli.run_checkpoint import RunStepArgument, open_run_checkpoint, run_problem
from danlu.cli.run_options import RunsDirOption
from danlu.spec import Recipe, SpecError
from danlu.spec.custom_model import CustomModel
from danlu.spec.run_folder import DEFAULT_RUNS_DIR

if TYPE_CHECKING:
    from danlu.framework.hf.tokenizer import ExportTokenizer

app = typer.Typer(help="Export runs to formats of other tools.", no_args_is_help=True)


@app.callback()
def _export() -> None:
    pass


@app.command("hf")
def export_hf(
    run: RunStepArgument,
    output: Annotated[Path, typer.Option("--output", "-o", metavar="DIR", help="Folder to write; must be new.")],
    dtype: Annotated[Literal["fp32", "bf16"], typer.Option(help="Dtype of the weights in the files.")] = "fp32",
    ema: Annotated[bool, typer.Option("--ema", help="The average of the weights (`[ema]`), not the weights.")] = False,
    folder: RunsDirOption = DEFAULT_RUNS_DIR,
    tolerance: Tolerance = None,
    compare: Compare = True,
    as_json: Json = False,
) -> None:
    """Export a run's weights and tokenizer as a Hugging Face model.

    Of the families Llama, Mistral, Qwen2, Qwen3, Mixtral and DeepSeek-V3, the one that has the model's traits. Ends by
    comparing logits with transformers, and with a table of what loaders read. Exit code 1 if logits differ by more than
    the tolerance, or if something in the folder is wrong.
    """
    import torch

    from danlu.framework.hf import convert
    from danlu.framework.hf.compare import load_decoder
    from danlu.framework.hf.config import CONFIG_FILE
    from danlu.framework.hf.layout import check_layout
    from danlu.framework.weights import buffer_shapes, parameter_shapes

    checkpoint = open_run_checkpoint(run, folder)
    recipe = checkpoint.recipe
    if isinstance(recipe.model, CustomModel):
        message = f"trains a custom model (`{recipe.model.factory}`), whose Hugging Face family Danlu does not know"
        hint = "save it from Python: danlu.Checkpointer reads its checkpoints into any layout"
        raise SpecError([run_problem(run, message, hint)])
    if ema and recipe.ema is None:
        raise SpecError([run_problem(run, "keeps no average of its weights", "omit --ema; a run needs a table [ema]")])
    model = recipe.model
    parameters = parameter_shapes(model)
    shapes = parameters | buffer_shapes(model)

    def read(name: str) -> torch.Tensor:
        tensor = torch.empty(shapes[name])
        checkpoint.fill({name: tensor}, "ema" if ema and name in parameters else "model")
        return tensor

    imported = Path(recipe.weights) if recipe.weights else None
    if imported is not None and not (missing := imported / convert.HF_CONFIG_DIR / CONFIG_FILE).is_file():
        typer.echo(f"tokenizer and other settings are not copied, because there is no {missing}", err=True)
        imported = None
    tokenizer = _tokenizer(recipe, imported)
    with weights_progress() as on_progress:
        family = convert.export_hf(
            model, read, output, imported, dtype, on_progress, tokenizer, lambda message: typer.echo(message, err=True)
        )
    figures = {
        "folder": str(output),
        "architecture": family.architecture,
        "run": checkpoint.run.name,
        "step": checkpoint.step,
    }
    stored = convert.EXPORT_DTYPES[dtype][1]
    raise typer.Exit(
        compare_and_report(
            figures,
            model,
            output,
            lambda: load_decoder(model, read, stored),
            tolerance,
            compare,
            as_json,
            check_layout(output),
        )
    )


def _tokenizer(recipe: Recipe, imported: Path | None) -> "ExportTokenizer | None":
    """The tokenizer that the run was trained with; None, with the reason, if it is no longer there."""
    from danlu.framework.hf.tokenizer import TOKENIZER_FILE, ExportTokenizer
    from danlu.runs.dataset import open_run_tokenizer

    try:
        tokenizer = ExportTokenizer(*open_run_tokenizer(recipe))
    except SpecError as error:
        typer.echo(f"the tokenizer of the run is not exported: {error}", err=True)
        return None
    if imported is not None and (imported / TOKENIZER_FILE).is_file() and not tokenizer.is_in(imported):
        typer.echo(
            f"the tokenizer of {imported} is not exported, because the run was trained with {tokenizer.tokenizer.name}",
            err=True,
        )
    return tokenizer
