"""`danlu data`: build, append, show and verify training data."""

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from danlu.cli.data_executor import BuildExecutor, ExecutorOption, RayAddressOption, open_tokenize_fn
from danlu.cli.data_locate import locate
from danlu.cli.json_output import print_json
from danlu.report.progress_bar import progress_bar
from danlu.report.terminal import Console
from danlu.runs.dataset import build_line, shard_count, skipped_lines
from danlu.spec import SpecError
from danlu.spec.problem import problem_at
from danlu.storage.data.build import DEFAULT_SHARD_TOKENS, BuildResult, build_dataset
from danlu.storage.data.dataset_index import DatasetIndex, read_index
from danlu.storage.data.token_shards import TokenShards
from danlu.storage.data.tokenizer import BYTES_TOKENIZER, BytesTokenizer, open_chat_template, open_tokenizer

app = typer.Typer(help="Training data: token shards in a folder.", no_args_is_help=True)

DatasetFolder = Annotated[Path, typer.Argument(metavar="DIR", help="Folder of token shards.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
EndOfText = Annotated[str | None, typer.Option(metavar="TOKEN", help="Token that ends a document.")]
ShardTokens = Annotated[int, typer.Option(min=1, help="Tokens in one shard file.")]
TextField = Annotated[
    str | None, typer.Option(help="Field of a JSON line that holds the text, or with --chat the messages.")
]
Chat = Annotated[
    bool,
    typer.Option(
        "--chat",
        help="Conversations: JSON lines with `messages`, in the tokenizer's chat template. Answers alone count.",
    ),
]
SkipBad = Annotated[bool, typer.Option("--skip-bad", help="Skip bad lines and files, and count them.")]

_PREVIEW_TOKENS = 400


@app.command("build")
def build_command(
    sources: Annotated[
        list[str],
        typer.Argument(
            metavar="SOURCE…", help="Files or folders of text or JSON lines (.jsonl, .jsonl.gz), or python-stdlib."
        ),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="DIR", help="Folder to write.")],
    tokenizer: Annotated[str, typer.Option(help="bytes, or the path of a Hugging Face tokenizer.json.")] = "bytes",
    end_of_text: EndOfText = None,
    shard_tokens: ShardTokens = DEFAULT_SHARD_TOKENS,
    chat: Chat = False,
    field: TextField = None,
    skip_bad: SkipBad = False,
    on: ExecutorOption = BuildExecutor.HERE,
    address: RayAddressOption = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a data set that is already there.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Turn text into token shards.

    One document per JSON line or text file; folders are read in order of their names.
    The same sources give the same bytes. An interrupted build resumes when it is run again.
    """
    encoder = open_tokenizer(tokenizer, end_of_text)
    template = open_chat_template(encoder, Path(tokenizer)) if chat else None
    with open_tokenize_fn(encoder, on, address) as encode, progress_bar("tokens") as on_progress:
        built = build_dataset(
            sources,
            output,
            encoder,
            on_progress,
            field=field or _default_field(chat),
            template=template,
            shard_tokens=shard_tokens,
            skip_bad=skip_bad,
            force=force,
            encode=encode,
            on_note=_print_note,
        )
    _print_result(output, built, as_json)


@app.command()
def append(
    sources: Annotated[list[str], typer.Argument(metavar="SOURCE…", help="What to add, as for `danlu data build`.")],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="DIR", help="Data set to add to.")],
    tokenizer: Annotated[
        str | None, typer.Option(help="The data set's tokenizer.json; none is needed for bytes.")
    ] = None,
    end_of_text: EndOfText = None,
    shard_tokens: ShardTokens = DEFAULT_SHARD_TOKENS,
    field: TextField = None,
    skip_bad: SkipBad = False,
    on: ExecutorOption = BuildExecutor.HERE,
    address: RayAddressOption = None,
    as_json: JsonOption = False,
) -> None:
    """Add text to a data set, or conversations to one of them, even while runs read it.

    Running jobs keep their recorded order and read the new text after their next checkpoint or resume.
    """
    index = read_index(output)
    known = index.tokenizer
    if tokenizer is None and known != BYTES_TOKENIZER:
        message = f'was built with tokenizer "{known}", whose file is needed to add to it'
        raise SpecError([problem_at(output, 1, "tokenizer", message, "--tokenizer FILE")])
    encoder = open_tokenizer(tokenizer or BYTES_TOKENIZER, end_of_text)
    template = open_chat_template(encoder, Path(tokenizer or "")) if index.has_loss_mask else None
    with open_tokenize_fn(encoder, on, address) as encode, progress_bar("tokens") as on_progress:
        built = build_dataset(
            sources,
            output,
            encoder,
            on_progress,
            field=field or _default_field(index.has_loss_mask),
            template=template,
            shard_tokens=shard_tokens,
            skip_bad=skip_bad,
            append=True,
            encode=encode,
            on_note=_print_note,
        )
    _print_result(output, built, as_json)


app.command()(locate)


@app.command()
def show(folder: DatasetFolder, as_json: JsonOption = False) -> None:
    """Show what a data set holds, and how it begins."""
    shards = TokenShards.open(folder)
    if as_json:
        typer.echo(shards.index.model_dump_json(indent=2))
        return
    console = Console()
    console.print(_table(folder, shards.index))
    console.print(_preview(shards))


@app.command()
def verify(folder: DatasetFolder, as_json: JsonOption = False) -> None:
    """Read every shard and compare its hash with the index; exit code 2 if one differs."""
    shards = TokenShards.open(folder)
    with progress_bar("hashes") as on_progress:
        shards.verify(on_progress)
    index = shards.index
    if as_json:
        print_json(
            {"folder": str(folder), "shards": len(index.shards), "tokens": index.tokens, "good": True}, indent=None
        )
    else:
        typer.echo(f"{folder}: {shard_count(index)}, {index.tokens:,} tokens: all match the index")


def _default_field(chat: bool) -> str:
    return "messages" if chat else "text"


def _print_result(output: Path, built: BuildResult, as_json: bool) -> None:
    for line in skipped_lines(built):
        typer.echo(line, err=True)
    if as_json:
        print_json(_result_json(output, built))
    else:
        typer.echo(build_line(output, built))


def _print_note(text: str) -> None:
    typer.echo(f"note: {text}", err=True)


def _result_json(folder: Path, built: BuildResult) -> dict[str, object]:
    index = built.index
    return {
        "folder": str(folder),
        "documents": index.documents,
        "tokens": index.tokens,
        "shards": len(index.shards),
        "seconds": round(built.seconds, 3),
        "unigram_loss": index.unigram_loss,
        "tokenizer": index.tokenizer,
        "vocabulary": index.vocabulary,
        "counted": index.counted,
        "left_out": dict(built.skipped),
        "edition": len(index.all_versions) - 1,
        "shards_of_a_broken_off_build": built.resumed_shards,
    }


def _table(folder: Path, index: DatasetIndex) -> Table:
    table = Table(title=str(folder), show_header=False, title_justify="left")
    rows = {
        "tokenizer": index.tokenizer,
        "vocabulary": f"{index.vocabulary:,} (end of text: {index.end_of_text})",
        "documents": f"{index.documents:,}",
        "tokens": f"{index.tokens:,}, {index.tokens / index.documents:,.0f} per document",
        "shards": f"{shard_count(index)} of {index.dtype}",
        "unigram loss": f"{index.unigram_loss:.4f}",
        "versions": "\n".join(
            f"{number}: {version.shards:,} shards, {version.tokens:,} tokens"
            for number, version in enumerate(index.all_versions)
        ),
        "verified": "every block, when read" if all(shard.sums for shard in index.shards) else "never",
        "sources": "\n".join(index.sources),
    }
    if index.has_loss_mask:
        rows["loss counts"] = f"{index.counted:,} tokens: answers alone"
    for name, value in rows.items():
        table.add_row(name, Text(value))
    return table


def _preview(shards: TokenShards) -> Text:
    """The first tokens: as text for the bytes tokenizer, else as ids; control characters are shown as �."""
    tokens = shards.read(0, min(_PREVIEW_TOKENS, shards.tokens))
    bytes_ = BytesTokenizer()
    if shards.index.tokenizer != bytes_.name:
        return Text(" ".join(map(str, tokens[: _PREVIEW_TOKENS // 8])))
    return Text("".join(c if c.isprintable() or c in "\n\t" else "�" for c in bytes_.decode(tokens)))
