"""`danlu import hf`: convert a published model to a folder that a recipe can start from."""

from pathlib import Path
from typing import Annotated

import typer

from danlu.cli.hf_result import Compare, Json, Tolerance, compare_and_report, weights_progress
from danlu.cli.import_checkpoint import import_dcp, import_megatron, import_safetensors

app = typer.Typer(help="Import models and checkpoints of other systems.", no_args_is_help=True)


@app.callback()
def _import() -> None:
    pass


@app.command("hf")
def import_hf(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder with config.json and safetensors.")],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="OUT", help="Folder to write; must be new.")],
    mtp: Annotated[bool, typer.Option("--mtp", help="Import modules of multi-token prediction too.")] = False,
    tolerance: Tolerance = None,
    compare: Compare = True,
    as_json: Json = False,
) -> None:
    """Import a Hugging Face model: Llama, Mistral, Mixtral, Qwen2, Qwen3, Gemma 2 and 3, gpt-oss or DeepSeek-V3.

    A recipe starts from it with `weights = "OUT"`. Ends by comparing logits with transformers; exit code 1 if they
    differ by more than the tolerance.
    """
    from danlu.framework.hf import convert
    from danlu.framework.hf.compare import load_imported_decoder

    with weights_progress() as on_progress:
        imported = convert.import_hf(folder, output, on_progress, mtp=mtp)
    for key in imported.ignored_keys:
        typer.echo(f"ignored, because Danlu does not know it: {key}", err=True)
    if imported.left_out:
        typer.echo(f"left out: {imported.left_out}", err=True)
    model = imported.model
    figures = {"folder": str(output), "architecture": imported.family.architecture}
    raise typer.Exit(
        compare_and_report(
            figures, model, folder, lambda: load_imported_decoder(output, model), tolerance, compare, as_json
        )
    )


app.command("dcp")(import_dcp)
app.command("megatron")(import_megatron)
app.command("safetensors")(import_safetensors)
