"""Files into descriptions, with every problem reported at once."""

import tomllib
from pathlib import Path
from types import UnionType
from typing import Any, TypeVar, Union, get_args, get_origin

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from danlu.spec import toml
from danlu.spec.catalogue import catalogue
from danlu.spec.cluster import Cluster
from danlu.spec.description import Description
from danlu.spec.plan import Plan
from danlu.spec.problem import Problem, SpecError, nearest, problem_at, shown
from danlu.spec.recipe import Recipe

D = TypeVar("D", bound=Description)


def load_recipe(path: Path) -> Recipe:
    """Read a recipe; `model.base` takes a catalogue model whose fields the table may change."""
    return _load(path, Recipe)


def load_plan(path: Path) -> Plan:
    """Read a plan."""
    return _load(path, Plan)


def load_cluster(name_or_path: str) -> Cluster:
    """Read a cluster from a file, or from the catalogue by its name."""
    path = Path(name_or_path)
    if path.suffix == ".toml" or path.exists():
        return _load(path, Cluster)
    return _load(_catalogue_file(name_or_path), Cluster)


def _catalogue_file(name: str) -> Path:
    known = catalogue("clusters")
    if name not in known:
        hint = nearest(name, list(known))
        message = f'"{name}" is neither a file nor a cluster of the catalogue'
        raise SpecError([problem_at(Path(name), 1, "cluster", message, hint)])
    return known[name]


def _load(path: Path, kind: type[D]) -> D:
    document = read_document(path)
    problems: list[Problem] = []
    values = document.values
    if kind is Recipe:
        values = _with_base(document, problems)
    try:
        description = kind.model_validate(values)
    except ValidationError as error:
        problems += [_problem(document, kind, detail) for detail in error.errors(include_url=False)]
    if problems:
        raise SpecError(sorted(problems, key=lambda problem: problem.line))
    return description


def read_document(path: Path) -> toml.Document:
    """Parse a file, or say in our own words why it cannot be read."""
    try:
        return toml.read(path)
    except FileNotFoundError:
        beside = [file.name for file in path.parent.glob("*.toml")] if path.parent.is_dir() else []
        hint = nearest(path.name, beside) if beside else ""
        raise SpecError([problem_at(path, 1, "file", "does not exist", hint)]) from None
    except (UnicodeDecodeError, IsADirectoryError) as error:
        raise SpecError([problem_at(path, 1, "file", f"is not a text file: {error}")]) from None
    except tomllib.TOMLDecodeError as error:
        message, _, place = str(error).partition(" (at line ")
        line = int(place.split(",")[0]) if place[:1].isdigit() else path.read_text().count("\n") + 1
        raise SpecError([problem_at(path, line, "syntax", f"is not TOML: {message}")]) from None


def _with_base(document: toml.Document, problems: list[Problem]) -> dict[str, Any]:
    """The recipe's values with the catalogue model that `model.base` names written out under its own fields."""
    model = document.values.get("model")
    if not isinstance(model, dict) or "base" not in model:
        return document.values
    own = dict(model)
    base, models = own.pop("base"), catalogue("models")
    if base not in models:
        hint = nearest(str(base), list(models))
        message = f"{shown(base)} is not a model of the catalogue"
        problems.append(problem_at(document.path, document.line(("model", "base")), "model.base", message, hint))
        base = "tiny-llama"  # so that the rest of the table is still checked
    known = toml.read(models[base]).values
    if isinstance(known.get("moe"), dict) and isinstance(own.get("moe"), dict):
        own["moe"] = known["moe"] | own["moe"]
    return document.values | {"model": known | own}


def _problem(document: toml.Document, kind: type[Description], detail: ErrorDetails) -> Problem:
    """One pydantic error in our words: value, expectation, nearest name."""
    loc = tuple(part for part in detail["loc"] if part != "[key]")
    key = ".".join(str(part) for part in loc) or "file"
    value, suggestion = detail["input"], ""
    if detail["type"] == "extra_forbidden":
        fields = _fields_at(kind, loc[:-1])
        message = "is not a setting"
        suggestion = nearest(str(loc[-1]), fields)
    elif detail["type"] == "missing":
        message = "is missing"
        suggestion = f"add `{loc[-1]} = …` to {_table(loc[:-1])}"
    elif detail["type"] == "literal_error":
        valid = [text.strip("'") for text in detail["ctx"]["expected"].replace(" or ", ", ").split(", ")]
        message = f"is {shown(value)}, but must be one of {', '.join(valid)}"
        suggestion = nearest(str(value), valid)
    elif detail["type"] == "value_error":
        expected = str(detail["ctx"]["error"])
        message = expected if "must be" in expected or "must have" in expected else _but(value, expected)
    else:
        message = _but(value, detail["msg"].removeprefix("Input should be "))
    return problem_at(document.path, document.line(loc), key, message, suggestion)


def _but(value: Any, expected: str) -> str:
    return f"is {shown(value)}, but must be {expected}"


def _table(loc: tuple[str | int, ...]) -> str:
    names = ".".join(str(part) for part in loc if isinstance(part, str))
    return f"[{names}]" if names else "the top of the file"


def _fields_at(kind: Any, loc: tuple[str | int, ...]) -> list[str]:
    """Names of the settings that are valid in the table at `loc`."""
    for part in loc:
        if isinstance(part, str) and isinstance(kind, type) and issubclass(kind, Description):
            kind = kind.model_fields[part].annotation
        kind = _inner(kind)
    return list(kind.model_fields) if isinstance(kind, type) and issubclass(kind, Description) else []


def _inner(kind: Any) -> Any:
    """The description inside `X | None` or `tuple[X, ...]`."""
    while get_origin(kind) in (Union, UnionType, tuple):
        kind = next(arg for arg in get_args(kind) if arg not in (type(None), Ellipsis))
    return kind
