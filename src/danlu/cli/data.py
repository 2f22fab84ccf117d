"""`danlu data`: build, show and verify training data."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Table
from rich.text import Text

from danlu.cli.data_at import at
from danlu.cli.data_on import Address, Builder, On, encoding
from danlu.spec import SpecError
from danlu.spec.problem import problem_at
from danlu.storage.build import SHARD_TOKENS, Built, build
from danlu.storage.index import Index, read_index
from danlu.storage.tokenizer import BYTES, BytesTokenizer, Tokenizer, open_tokenizer
from danlu.storage.tokens import OnProgress, TokenShards

app = typer.Typer(help="Training data: token shards in a folder.", no_args_is_help=True)

Folder = Annotated[Path, typer.Argument(metavar="DIR", help="Folder of token shards.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
EndOfText = Annotated[str | None, typer.Option(metavar="TOKEN", help="Token that ends a document.")]
ShardTokens = Annotated[int, typer.Option(min=1, help="Tokens in one shard file.")]
TextField = Annotated[str, typer.Option(help="Field of a JSON line that holds the text.")]
SkipBad = Annotated[bool, typer.Option("--skip-bad", help="Leave bad lines and files out, and count them.")]

_SHOWN_TOKENS = 400


@app.command("build")
def build_(
    sources: Annotated[
        list[str],
        typer.Argument(
            metavar="SOURCE…", help="Files or folders of text or JSON lines (.jsonl, .jsonl.gz), or python-stdlib."
        ),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="DIR", help="Folder to write.")],
    tokenizer: Annotated[str, typer.Option(help="bytes, or the path of a Hugging Face tokenizer.json.")] = "bytes",
    end_of_text: EndOfText = None,
    shard_tokens: ShardTokens = SHARD_TOKENS,
    field: TextField = "text",
    skip_bad: SkipBad = False,
    on: On = Builder.HERE,
    address: Address = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a data set that is already there.")] = False,
    as_json: Json = False,
) -> None:
    """Turn text into token shards.

    One document a JSON line or a text file; folders are read in order of their names.
    The same sources give the same bytes. A build that was broken off goes on when it is started again.
    """
    encoder = open_tokenizer(tokenizer, end_of_text)
    with encoding(encoder, on, address) as encode, _progress("tokens") as on_progress:
        built = build(
            sources,
            output,
            encoder,
            on_progress,
            field=field,
            shard_tokens=shard_tokens,
            skip_bad=skip_bad,
            force=force,
            encode=encode,
            on_note=_note,
        )
    _tell(output, built, as_json)


@app.command()
def append(
    sources: Annotated[list[str], typer.Argument(metavar="SOURCE…", help="What to add, as for `danlu data build`.")],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="DIR", help="Data set to add to.")],
    tokenizer: Annotated[
        str | None, typer.Option(help="The data set's tokenizer.json; none is needed for bytes.")
    ] = None,
    end_of_text: EndOfText = None,
    shard_tokens: ShardTokens = SHARD_TOKENS,
    field: TextField = "text",
    skip_bad: SkipBad = False,
    on: On = Builder.HERE,
    address: Address = None,
    as_json: Json = False,
) -> None:
    """Add text to a data set, under runs that read it too.

    Runs go on in the order they promised, and read the new text from their next checkpoint or resume on.
    """
    known = read_index(output).tokenizer
    if tokenizer is None and known != BYTES:
        message = f'was built with tokenizer "{known}", whose file is needed to add to it'
        raise SpecError([problem_at(output, 1, "tokenizer", message, "--tokenizer FILE")])
    encoder = open_tokenizer(tokenizer or BYTES, end_of_text)
    with encoding(encoder, on, address) as encode, _progress("tokens") as on_progress:
        built = build(
            sources,
            output,
            encoder,
            on_progress,
            field=field,
            shard_tokens=shard_tokens,
            skip_bad=skip_bad,
            append=True,
            encode=encode,
            on_note=_note,
        )
    _tell(output, built, as_json)


app.command()(at)


@app.command()
def show(folder: Folder, as_json: Json = False) -> None:
    """Show what a data set holds, and how it begins."""
    shards = TokenShards.open(folder)
    if as_json:
        typer.echo(shards.index.model_dump_json(indent=2))
        return
    console = Console()
    console.print(_table(folder, shards.index))
    console.print(_beginning(shards))


@app.command()
def verify(folder: Folder, as_json: Json = False) -> None:
    """Read every shard and compare its hash with the index; exit code 2 if one differs."""
    shards = TokenShards.open(folder)
    with _progress("hashes") as on_progress:
        shards.verify(on_progress)
    index = shards.index
    if as_json:
        typer.echo(
            json.dumps({"folder": str(folder), "shards": len(index.shards), "tokens": index.tokens, "good": True})
        )
    else:
        typer.echo(f"{folder}: {_shards(index)}, {index.tokens:,} tokens: all as the index says")


def build_with_progress(sources: list[str], folder: Path, tokenizer: Tokenizer) -> None:
    """Build a data set that a command needs, with a bar, what was left out, and the result in a line."""
    with _progress("tokens") as on_progress:
        built = build(sources, folder, tokenizer, on_progress)
    _warn_left_out(built)
    typer.echo(_result_line(folder, built))


@contextmanager
def _progress(label: str) -> Iterator[OnProgress]:
    """A bar over bytes on standard error, gone when the work is done."""
    columns = (TextColumn(label), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(label, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


def _tell(output: Path, built: Built, as_json: bool) -> None:
    _warn_left_out(built)
    typer.echo(json.dumps(_figures(output, built), indent=2) if as_json else _result_line(output, built))


def _warn_left_out(built: Built) -> None:
    if built.left_out:
        counts = ", ".join(f"{count:,} {reason}" for reason, count in sorted(built.left_out.items()))
        typer.echo(f"left out: {counts}", err=True)
    for problem in built.examples:
        typer.echo(f"  {problem.file}:{problem.line}: {problem.key}: {problem.message}", err=True)


def _note(text: str) -> None:
    typer.echo(f"note: {text}", err=True)


def _figures(folder: Path, built: Built) -> dict[str, object]:
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
        "left_out": dict(built.left_out),
        "edition": len(index.all_editions) - 1,
        "shards_of_a_broken_off_build": built.resumed,
    }


def _result_line(folder: Path, built: Built) -> str:
    index = built.index
    return (
        f"{folder}: {index.documents:,} documents, {index.tokens:,} tokens, {_shards(index)}"
        f" in {built.seconds:.1f} s, unigram loss {index.unigram_loss:.4f}"
        + (f", edition {len(index.editions) - 1}" if len(index.editions) > 1 else "")
        + (f" ({built.resumed} shards were there from a build that was broken off)" if built.resumed else "")
    )


def _shards(index: Index) -> str:
    return f"{len(index.shards):,} shard{'s' if len(index.shards) > 1 else ''}"


def _table(folder: Path, index: Index) -> Table:
    table = Table(title=str(folder), show_header=False, title_justify="left")
    rows = {
        "tokenizer": index.tokenizer,
        "vocabulary": f"{index.vocabulary:,} (end of text: {index.end_of_text})",
        "documents": f"{index.documents:,}",
        "tokens": f"{index.tokens:,}, {index.tokens / index.documents:,.0f} a document",
        "shards": f"{_shards(index)} of {index.dtype}",
        "unigram loss": f"{index.unigram_loss:.4f}",
        "editions": "\n".join(
            f"{number}: {edition.shards:,} shards, {edition.tokens:,} tokens"
            for number, edition in enumerate(index.all_editions)
        ),
        "checked": "every block, when it is read" if all(shard.sums for shard in index.shards) else "not on reading",
        "sources": "\n".join(index.sources),
    }
    for name, value in rows.items():
        table.add_row(name, Text(value))
    return table


def _beginning(shards: TokenShards) -> Text:
    """The first tokens: as text where we can tell, as ids otherwise; what would move the cursor is shown as �."""
    tokens = shards.read(0, min(_SHOWN_TOKENS, shards.tokens))
    bytes_ = BytesTokenizer()
    if shards.index.tokenizer != bytes_.name:
        return Text(" ".join(map(str, tokens[: _SHOWN_TOKENS // 8])))
    return Text("".join(c if c.isprintable() or c in "\n\t" else "�" for c in bytes_.decode(tokens)))
