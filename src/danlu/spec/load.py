"""Files into descriptions, with every problem reported at once."""

import re
import tomllib
from dataclasses import dataclass
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Generic, Literal, TypeVar, Union, get_args, get_origin

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from danlu.spec import toml
from danlu.spec.catalogue import catalogue
from danlu.spec.cluster import Cluster
from danlu.spec.description import Description
from danlu.spec.model import Model
from danlu.spec.own_model import OwnModel
from danlu.spec.plan import Plan
from danlu.spec.problem import Problem, SpecError, dotted, meant, nearest, problem_at, shown
from danlu.spec.recipe import MODEL_KINDS, Recipe

D = TypeVar("D", bound=Description)
D_co = TypeVar("D_co", bound=Description, covariant=True)


@dataclass(frozen=True)
class Sourced(Generic[D_co]):
    """A description beside the file it was read from, so that a problem can name its line."""

    value: D_co
    document: toml.Document

    def problem(self, key: str, message: str, suggestion: str = "") -> Problem:
        """A problem with the setting `key`, a dotted path; it points at the nearest table if the file leaves it out."""
        parts = key.replace("]", "").replace("[", ".").split(".")
        path = tuple(int(part) if part.isdigit() else part for part in parts)
        return problem_at(self.document.path, self.document.line(path), key, message, suggestion)


def load_recipe(path: Path) -> Recipe:
    """Read a recipe; `model.base` takes a catalogue model whose fields the table may change."""
    return read_recipe(path).value


def load_plan(path: Path) -> Plan:
    """Read a plan."""
    return read_plan(path).value


def load_cluster(name_or_path: str) -> Cluster:
    """Read a cluster from a file, or from the catalogue by its name."""
    return read_cluster(name_or_path).value


def load_model(name_or_path: str) -> Model:
    """Read a model from a file of its own, or from the catalogue by its name."""
    return _read(_file(name_or_path, "models"), Model).value


def read_recipe(path: Path) -> Sourced[Recipe]:
    """Read a recipe and keep its lines."""
    return _read(path, Recipe)


def read_plan(path: Path) -> Sourced[Plan]:
    """Read a plan and keep its lines."""
    return _read(path, Plan)


def read_cluster(name_or_path: str) -> Sourced[Cluster]:
    """Read a cluster, from a file or the catalogue, and keep its lines."""
    return _read(_file(name_or_path, "clusters"), Cluster)


def _file(name_or_path: str, kind: Literal["models", "clusters"]) -> Path:
    path, known = Path(name_or_path), catalogue(kind)
    if path.suffix == ".toml" or path.is_file():
        return path
    if name_or_path not in known:
        word = kind.removesuffix("s")
        message = f'"{name_or_path}" is neither a file nor a {word} of the catalogue'
        raise SpecError([problem_at(path, 1, word, message, nearest(name_or_path, list(known)))])
    return known[name_or_path]


def _read(path: Path, kind: type[D]) -> Sourced[D]:
    document = read_document(path)
    values, problems = document.values, list[Problem]()
    if kind is Recipe:
        values, problems = _with_base(document)
    try:
        description = kind.model_validate(values)
    except ValidationError as error:
        details = error.errors(include_url=False)
        if problems:  # without its base a model table lacks fields that are not the user's fault
            details = [d for d in details if d["loc"][:1] != ("model",) or d["type"] == "extra_forbidden"]
        problems += [_problem(document, kind, detail) for detail in _without_echoes(kind, details)]
    if problems:
        raise SpecError(sorted(problems, key=lambda problem: problem.line))
    return Sourced(description, document)


def read_document(path: Path) -> toml.Document:
    """Parse a file, or say in our own words why it cannot be read."""
    try:
        return toml.read(path)
    except FileNotFoundError:
        beside = [file.name for file in path.parent.glob("*.toml")] if path.parent.is_dir() else []
        hint = nearest(path.name, beside) if beside else ""
        raise SpecError([problem_at(path, 1, "file", "does not exist", hint)]) from None
    except tomllib.TOMLDecodeError as error:
        message, _, place = str(error).partition(" (at ")
        line = (
            int(place.split(",")[0][5:])
            if place.startswith("line ")
            else path.read_text(encoding="utf-8").count("\n") + 1
        )
        raise SpecError([problem_at(path, line, "syntax", f"is not TOML: {message}")]) from None
    except UnicodeDecodeError as error:
        raise SpecError([problem_at(path, 1, "file", f"is not text in UTF-8: {error.reason}")]) from None
    except OSError as error:
        raise SpecError([problem_at(path, 1, "file", f"cannot be read: {error.strerror}")]) from None


def _with_base(document: toml.Document) -> tuple[dict[str, Any], list[Problem]]:
    """The recipe's values with the model it builds on written out under its own fields.

    That is the catalogue model that `model.base` names, or else the one that its `weights` were imported with.
    """
    model = document.values.get("model")
    if isinstance(document.values.get("weights"), str) and (model is None or _has_no_base(model)):
        return _with_imported(document, model or {})
    if not isinstance(model, dict) or "base" not in model:
        return document.values, []
    own = dict(model)
    base, models = own.pop("base"), catalogue("models")
    if not isinstance(base, str) or base not in models:
        message = f"is {shown(base)}, but must be a model of the catalogue"
        line, hint = document.line(("model", "base")), nearest(str(base), list(models))
        # The other fields stay in the values, so that a misspelt one is reported in the same breath.
        return document.values | {"model": own}, [problem_at(document.path, line, "model.base", message, hint)]
    return document.values | {"model": _merged(toml.read(models[base]).values, own)}, []


def _has_no_base(model: Any) -> bool:
    return isinstance(model, dict) and "base" not in model


def _with_imported(document: toml.Document, own: dict[str, Any]) -> tuple[dict[str, Any], list[Problem]]:
    """The recipe's values with the model of its weights; a recipe that says the whole model does not need it."""
    weights = document.values["weights"]
    path = document.path.parent / weights / "model.toml"
    if not weights or (own and not path.is_file()):
        return document.values, []
    if not path.is_file():
        message = f"is {shown(weights)}, but there is no {path}"
        hint = f"danlu import hf DIR -o {document.path.parent / weights}"
        return document.values, [problem_at(document.path, document.line(("weights",)), "weights", message, hint)]
    return document.values | {"model": _merged(read_document(path).values, own)}, []


def _merged(known: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    """A model with fields changed, those of its experts too."""
    if isinstance(known.get("moe"), dict) and isinstance(own.get("moe"), dict):
        own = own | {"moe": known["moe"] | own["moe"]}
    return known | own


def _without_echoes(kind: type[Description], details: list[ErrorDetails]) -> list[ErrorDetails]:
    """Leave out that a setting is missing where a misspelt one is taken for it: it is one mistake."""
    misspelt = [detail["loc"] for detail in details if detail["type"] == "extra_forbidden"]
    found = {(*loc[:-1], meant(str(loc[-1]), _fields_at(kind, loc[:-1]))) for loc in misspelt}
    return [detail for detail in details if detail["type"] != "missing" or detail["loc"] not in found]


def _problem(document: toml.Document, kind: type[Description], detail: ErrorDetails) -> Problem:
    """One pydantic error in our words: value, expectation, nearest name."""
    tagged = tuple(part for part in detail["loc"] if part != "[key]")
    loc = _in_file(tagged)
    value, suggestion = detail["input"], ""
    if detail["type"] == "extra_forbidden":
        message = "is not a setting"
        suggestion = nearest(str(loc[-1]), _fields_at(kind, tagged[:-1]))
    elif detail["type"] == "missing":
        message = "is missing"
        suggestion = _add(kind, tagged)
    elif detail["type"] == "literal_error":
        valid = [text.strip("'") for text in detail["ctx"]["expected"].replace(" or ", ", ").split(", ")]
        message = f"is {shown(value)}, but must be one of {', '.join(valid)}"
        suggestion = nearest(str(value), valid)
    elif detail["type"] == "value_error":
        # A validator over a whole table names the field it blames first: "`heads` must be …", and may add a line with a
        # suggestion.
        text, _, suggestion = str(detail["ctx"]["error"]).partition("\n")
        blamed, expected = _blamed(text)
        loc += blamed
        message = expected if blamed else _but(value, expected)
    else:
        message = _but(value, detail["msg"].removeprefix("Input should be "))
    return problem_at(document.path, document.line(loc), dotted(loc) or "file", message, suggestion)


def _in_file(loc: toml.KeyPath) -> toml.KeyPath:
    """A place as the file has it: pydantic puts in which of the two ways to say a model was taken."""
    return loc[:1] + loc[2:] if loc[:1] == ("model",) and loc[1:2] and loc[1] in MODEL_KINDS else loc


def _blamed(text: str) -> tuple[tuple[str, ...], str]:
    found = re.match(r"`([\w.]+)` (must .*)", text)
    return (tuple(found[1].split(".")), found[2]) if found else ((), text)


def _but(value: Any, expected: str) -> str:
    return f"is {shown(value)}, but must be {expected}"


def _add(kind: type[Description], loc: toml.KeyPath) -> str:
    """How to add a setting that is missing: a line of a table, or a table."""
    is_table, loc = bool(_fields_at(kind, loc)), _in_file(loc)
    if is_table:
        return f"add a table [[{loc[-1]}]]" if loc == ("levels",) else f"add a table [{dotted(loc)}]"
    names = ".".join(part for part in loc[:-1] if isinstance(part, str))
    table = f"[[{names}]]" if any(isinstance(part, int) for part in loc[-2:-1]) else f"[{names}]"
    return f"add `{loc[-1]} = …` to {table if names else 'the top of the file'}"


def _fields_at(kind: Any, loc: toml.KeyPath) -> list[str]:
    """Names of the settings that are valid in the table at `loc`; none if it is not a table of fixed names."""
    if kind is Recipe and loc[:2] == ("model", "own"):
        kind, loc = OwnModel, loc[2:]
    for part in _in_file(loc):
        if not isinstance(part, str):
            continue
        if not _is_description(kind) or part not in kind.model_fields:
            return []
        kind = _inner(kind.model_fields[part].annotation)
    if not _is_description(kind):
        return []
    return [*kind.model_fields, "base"] if kind is Model and loc else list(kind.model_fields)


def _is_description(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Description)


def _inner(kind: Any) -> Any:
    """The description inside `X | None`, `tuple[X, ...]` or `Annotated[X, …]`; the first of several."""
    while get_origin(kind) in (Union, UnionType, tuple, Annotated):
        kind = next(arg for arg in get_args(kind) if arg not in (type(None), Ellipsis))
    return kind
