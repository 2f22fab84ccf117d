"""`danlu schema`: JSON Schemas of the files."""

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from danlu.report.terminal import Console
from danlu.spec.problem import SpecError, problem_at, suggest_name
from danlu.spec.schema import FILE_KINDS, FileKind
from danlu.spec.schema import json_schema as schema_of

_WHAT: dict[FileKind, str] = {
    "recipe": "recipe.toml: what to train",
    "cluster": "cluster.toml: what it runs on",
    "plan": "plan.toml: how it runs",
    "event": "one line of events.jsonl: what happened",
}


def schema(
    kind: Annotated[str | None, typer.Argument(help=f"One of {', '.join(FILE_KINDS)}; lists them if omitted.")] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Folder to write KIND.schema.json to.")] = None,
) -> None:
    """Print the JSON Schema of a file, so that your editor completes and checks it."""
    wanted = [name for name in FILE_KINDS if kind in (None, name)]
    if not wanted:
        message = f'"{kind}" is not a kind of file'
        raise SpecError([problem_at(Path("schema"), 1, "kind", message, suggest_name(str(kind), list(FILE_KINDS)))])
    if output is not None:
        for name in wanted:
            _write(output, name)
    elif kind is not None:
        typer.echo(_text(wanted[0]), nl=False)
    else:
        table = Table("schema", "file", box=None)
        for name in FILE_KINDS:
            table.add_row(name, _WHAT[name])
        Console().print(table)


def _write(folder: Path, kind: FileKind) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{kind}.schema.json"
    path.write_text(_text(kind), encoding="utf-8")
    typer.echo(path)


def _text(kind: FileKind) -> str:
    return json.dumps(schema_of(kind), indent=2, ensure_ascii=False) + "\n"
