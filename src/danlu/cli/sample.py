"""`danlu sample`: text from any checkpoint of a run."""

import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from danlu.cli.ckpt_ref import fail, report_errors
from danlu.cli.hf_result import weights_progress
from danlu.cli.json_output import print_json
from danlu.cli.run_checkpoint import RunCheckpoint, RunStepArgument, open_run_checkpoint
from danlu.cli.run_options import RunsDirOption
from danlu.cli.sample_output import SamplePrinter, save_samples
from danlu.cli.sample_prompts import read_prompts
from danlu.report.terminal import Console, print_warning
from danlu.spec.run_folder import DEFAULT_RUNS_DIR
from danlu.spec.samples import Sample, SampleSet

if TYPE_CHECKING:
    from torch import nn

    from danlu.framework.sampling import Sampling
    from danlu.framework.text_generation import TextCodec

_DEFAULT_TOKENS = 100


def sample(
    run: RunStepArgument,
    prompt: Annotated[
        list[str] | None,
        typer.Option(
            "--prompt", "-p", help="Text to continue; may be repeated. Default: standard input, if it is piped."
        ),
    ] = None,
    prompts: Annotated[
        Path | None, typer.Option(metavar="FILE", help='Prompts: a line each, or {"prompt": …} a line of .jsonl.')
    ] = None,
    tokens: Annotated[
        int | None,
        typer.Option(min=1, max=10**9, help="Longest text in tokens; default: 100, within the trained length."),
    ] = None,
    temperature: Annotated[
        float, typer.Option(min=0.0, help="Divides the logits; 0 takes the most likely token.")
    ] = 1.0,
    top_k: Annotated[int, typer.Option(min=0, help="Draw from the so many most likely tokens; 0 for all.")] = 0,
    top_p: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Draw from the fewest tokens whose probabilities add up to this.")
    ] = 1.0,
    count: Annotated[int, typer.Option(min=1, max=10**6, help="Samples of every prompt.")] = 1,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Seed of the draws.")] = 0,
    dtype: Annotated[Literal["fp32", "bf16"], typer.Option(help="Dtype of weights and computation.")] = "fp32",
    chip: Annotated[str | None, typer.Option(help="Chip to compute on; default: an accelerator, or the CPU.")] = None,
    save: Annotated[
        bool, typer.Option("--save", help="Keep them in the run's folder, and show them on its page.")
    ] = False,
    folder: RunsDirOption = DEFAULT_RUNS_DIR,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Continue prompts with the text that a checkpoint finds likely.

    The checkpoint may be of any layout, and of a run that is still running; the model must fit into this process.
    Without a prompt the model begins a text of its own.
    """
    from danlu.framework.text_generation import sample_text

    asked = read_prompts(prompt, prompts, sys.stdin)
    sampling = _sampling(temperature, top_k, top_p, count, seed)
    checkpoint = open_run_checkpoint(run, folder)
    with _plain_errors():
        codec, length = _codec(checkpoint, asked, tokens)
        model = _load_model(checkpoint, dtype, chip)
        console = Console(highlight=False)
        began, drawn = time.perf_counter(), list[Sample]()
        for number, text in enumerate(asked):
            printer = None if as_json else SamplePrinter(console, text, number, len(asked), count)
            drawn += sample_text(model, codec, text, sampling, tokens=length, seed=seed, count=count, listener=printer)
    seconds = time.perf_counter() - began
    result = SampleSet(
        run=checkpoint.run.name,
        step=checkpoint.step,
        time=time.time(),
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        dtype=dtype,
        samples=tuple(drawn),
    )
    if any(each.ended == "context" for each in drawn):
        print_warning(f"text ends where the model's context of {codec.context:,} tokens is full")
    saved = save_samples(checkpoint.run, checkpoint.recipe.access, result) if save else None
    if as_json:
        print_json(result.model_dump(mode="json") | {"file": str(saved) if saved else None})
        return
    total = sum(each.tokens for each in drawn)
    typer.echo(f"{checkpoint.run.name}@{checkpoint.step}: {total:,} tokens in {seconds:.1f} s", err=True)
    if saved:
        typer.echo(f"saved: {saved}, and on the run's page {checkpoint.run.report}", err=True)


@contextmanager
def _plain_errors() -> Iterator[None]:
    """Errors of the model, its code or its checkpoint as messages, and so its warnings, each of them once."""
    from danlu.framework.custom.construct import CustomModelError
    from danlu.framework.sampling import NonFiniteLogitsError
    from danlu.framework.text_generation import PromptTooLongError
    from danlu.storage.checkpoint.restore import TensorMismatchError

    with report_errors(), warnings.catch_warnings():
        warnings.simplefilter("once", RuntimeWarning)
        warnings.showwarning = lambda message, *_: print_warning(str(message))
        try:
            yield
        except (CustomModelError, NonFiniteLogitsError, PromptTooLongError, TensorMismatchError) as error:
            fail(str(error))


def _sampling(temperature: float, top_k: int, top_p: float, count: int, seed: int) -> "Sampling":
    from danlu.framework.sampling import Sampling

    ignored = {"--top-k": top_k != 0, "--top-p": top_p != 1, "--count": count != 1, "--seed": seed != 0}
    if temperature == 0 and (option := next((name for name, given in ignored.items() if given), None)):
        fail(f"{option} has no effect with --temperature 0, which always takes the most likely token: omit one of them")
    try:
        return Sampling(temperature=temperature, top_k=top_k, top_p=top_p)
    except ValueError as error:
        fail(str(error))


def _codec(checkpoint: RunCheckpoint, prompts: list[str], tokens: int | None) -> "tuple[TextCodec, int]":
    """The run's tokenizer and context, and how many tokens to draw.

    A prompt that does not fit is an error before weights are read.
    """
    from danlu.framework.context_length import context_length
    from danlu.framework.text_generation import TextCodec
    from danlu.runs.dataset import open_run_tokenizer

    recipe = checkpoint.recipe
    tokenizer, end_of_text = open_run_tokenizer(recipe)
    codec = TextCodec(tokenizer=tokenizer, end_of_text=end_of_text, context=context_length(recipe))
    longest = max(len(codec.encode(text)) for text in prompts)
    trained = recipe.batch.length
    if tokens is None:
        tokens = max(1, min(_DEFAULT_TOKENS, trained - longest))
    if (last := min(longest + tokens, codec.context)) > trained:
        print_warning(
            f"prompt and text may have {last:,} tokens, but the run trains on sequences of {trained:,}: what comes "
            "after is at positions the model has never seen"
        )
    return codec, tokens


def _load_model(checkpoint: RunCheckpoint, dtype: Literal["fp32", "bf16"], chip: str | None) -> "nn.Module":
    from danlu.chips.registry import find_chip
    from danlu.framework.full_model import load_full_model
    from danlu.framework.precision import DTYPES

    device = find_chip(chip).runtime.set_device(0)
    with weights_progress() as on_progress:
        return load_full_model(checkpoint.recipe.model, checkpoint.fill, device, DTYPES[dtype], on_progress)
