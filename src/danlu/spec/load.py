"""Loads files into descriptions, with all problems reported at once."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Generic, Literal, TypeVar, Union, get_args, get_origin

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from danlu.spec import toml
from danlu.spec.catalog import catalog_entries
from danlu.spec.cluster import Cluster
from danlu.spec.custom_model import CustomModel
from danlu.spec.description import SpecModel
from danlu.spec.model import Model
from danlu.spec.operator_table import OperatorTable
from danlu.spec.overrides import apply_overrides
from danlu.spec.plan import Plan
from danlu.spec.problem import Problem, SpecError, closest_name, format_key, format_value, problem_at, suggest_name
from danlu.spec.quantity import BARE_NUMBERS, IN_FILE
from danlu.spec.recipe import MODEL_TAGS, Recipe
from danlu.spec.recompute import RECOMPUTE_TAGS, RecomputeLayers

_TAGS: dict[object, tuple[str, ...]] = {"model": MODEL_TAGS, "recompute": RECOMPUTE_TAGS}
"""Fields that are one of several kinds, with what pydantic calls these."""
_EVERY_KEY = "remove it; `danlu schema` describes every setting"
D = TypeVar("D", bound=SpecModel)
D_co = TypeVar("D_co", bound=SpecModel, covariant=True)


@dataclass(frozen=True)
class ParsedSpec(Generic[D_co]):
    """A description with the file it was read from, so that a problem can name its line."""

    value: D_co
    document: toml.TomlDocument

    def problem(self, key: str, message: str, suggestion: str = "") -> Problem:
        """A problem with the setting `key`, a dotted path; it points at the nearest table if the file omits it."""
        parts = key.replace("]", "").replace("[", ".").split(".")
        path = tuple(int(part) if part.isdigit() else part for part in parts)
        return problem_at(*self.document.location(path), key, message, suggestion)


def load_recipe(path: Path) -> Recipe:
    """Read a recipe; `model.base` names a catalog model whose fields the table may override."""
    return read_recipe(path).value


def load_plan(path: Path) -> Plan:
    """Read a plan."""
    return read_plan(path).value


def load_operator_table(path: Path) -> OperatorTable:
    """Read what `danlu ops tune` wrote."""
    return _read(path, OperatorTable).value


def load_cluster(name_or_path: str) -> Cluster:
    """Read a cluster from a file, or from the catalog by its name."""
    return read_cluster(name_or_path).value


def load_model(name_or_path: str) -> Model:
    """Read a model from its own file, or from the catalog by its name."""
    return _read(_file(name_or_path, "models"), Model).value


def read_recipe(path: Path, settings: Sequence[str] = ()) -> ParsedSpec[Recipe]:
    """Read a recipe and keep its lines; `settings` such as `steps=10` override it."""
    return _read(path, Recipe, settings)


def read_plan(path: Path) -> ParsedSpec[Plan]:
    """Read a plan and keep its lines."""
    return _read(path, Plan)


def read_cluster(name_or_path: str) -> ParsedSpec[Cluster]:
    """Read a cluster, from a file or the catalog, and keep its lines."""
    return _read(_file(name_or_path, "clusters"), Cluster)


def _file(name_or_path: str, kind: Literal["models", "clusters"]) -> Path:
    path, known = Path(name_or_path), catalog_entries(kind)
    if path.suffix == ".toml" or path.is_file():
        return path
    if name_or_path not in known:
        word = kind.removesuffix("s")
        message = f'"{name_or_path}" is neither a file nor a {word} of the catalog'
        raise SpecError([problem_at(path, 1, word, message, suggest_name(name_or_path, list(known)))])
    return known[name_or_path]


def _read(path: Path, kind: type[D], settings: Sequence[str] = ()) -> ParsedSpec[D]:
    document = read_document(path)
    if settings:
        document = apply_overrides(document, settings)
    values, problems = document.values, list[Problem]()
    if kind is Recipe:
        values, problems = _with_base(document)
        if _of_a_run(document.values):
            values = _with_new_names(values)
    try:
        description = kind.model_validate(values, context=_context(document.values))
    except ValidationError as error:
        details = error.errors(include_url=False)
        if problems:  # without its base a model table lacks fields, which is not the user's fault
            details = [d for d in details if d["loc"][:1] != ("model",) or d["type"] == "extra_forbidden"]
        problems += [_problem(document, kind, detail) for detail in _without_duplicates(kind, details)]
    if problems:
        raise SpecError(sorted(problems, key=lambda problem: problem.line))
    return ParsedSpec(description, document)


def _context(values: dict[str, Any]) -> dict[str, bool]:
    """How strict a file is parsed: units are required, unless an early Danlu without units wrote it.

    Those files contain what no user writes: the source of a chip's figures, both `shards` and `sources`, or a
    prediction.
    """
    chip = values.get("chip")
    probed = isinstance(chip, dict) and "measured" in chip
    return {IN_FILE: True, BARE_NUMBERS: probed or _of_a_run(values) or "prediction" in values}


def _of_a_run(values: dict[str, Any]) -> bool:
    """Whether Danlu wrote this recipe into a run's folder, with every setting."""
    data = values.get("data")
    return isinstance(data, dict) and "shards" in data and "sources" in data


def _with_new_names(values: dict[str, Any]) -> dict[str, Any]:
    """What Danlu 0.1 wrote, with the keys of today; in a user's file an old key is refused with the new one."""
    model = values.get("model")
    moe = model.get("moe") if isinstance(model, dict) else None
    if not isinstance(model, dict) or not isinstance(moe, dict) or "normalise" not in moe:
        return values
    new = {("normalize" if key == "normalise" else key): value for key, value in moe.items()}
    return values | {"model": model | {"moe": new}}


def read_document(path: Path) -> toml.TomlDocument:
    """Parse a file, or raise `SpecError` with the reason."""
    try:
        return toml.read(path)
    except FileNotFoundError:
        beside = [file.name for file in path.parent.glob("*.toml")] if path.parent.is_dir() else []
        hint = suggest_name(path.name, beside) if beside else ""
        hint = hint or "give the path of a TOML file; `danlu catalog NAME` prints one to start from"
        raise SpecError([problem_at(path, 1, "file", "does not exist", hint)]) from None


def _with_base(document: toml.TomlDocument) -> tuple[dict[str, Any], list[Problem]]:
    """The recipe's values with its model table merged over the base model.

    That is the catalog model that `model.base` names, or else the model of the imported `weights`.
    """
    model = document.values.get("model")
    if isinstance(document.values.get("weights"), str) and (model is None or _has_no_base(model)):
        return _with_imported(document, model or {})
    if not isinstance(model, dict) or "base" not in model:
        return document.values, []
    table = dict(model)
    base, models = table.pop("base"), catalog_entries("models")
    if not isinstance(base, str) or base not in models:
        message = f"is {format_value(base)}, but must be a model of the catalog"
        location, hint = document.location(("model", "base")), suggest_name(str(base), list(models))
        # The other fields stay in the values, so that a misspelled one is reported too.
        return document.values | {"model": table}, [problem_at(*location, "model.base", message, hint)]
    return document.values | {"model": _merged(toml.read(models[base]).values, table)}, []


def _has_no_base(model: Any) -> bool:
    return isinstance(model, dict) and "base" not in model


def _with_imported(document: toml.TomlDocument, table: dict[str, Any]) -> tuple[dict[str, Any], list[Problem]]:
    """The recipe's values with the model of its weights; not needed if the recipe describes the full model."""
    weights = document.values["weights"]
    path = document.path.parent / weights / "model.toml"
    if not weights or (table and not path.is_file()):
        return document.values, []
    if not path.is_file():
        message = f"is {format_value(weights)}, but there is no {path}"
        hint = f"danlu import hf DIR -o {document.path.parent / weights}"
        return document.values, [problem_at(document.path, document.line(("weights",)), "weights", message, hint)]
    imported = _with_new_names({"model": read_document(path).values})["model"]
    return document.values | {"model": _merged(imported, table)}, []


def _merged(known: dict[str, Any], table: dict[str, Any]) -> dict[str, Any]:
    """A model with fields changed, those of its experts too."""
    if isinstance(known.get("moe"), dict) and isinstance(table.get("moe"), dict):
        table = table | {"moe": known["moe"] | table["moe"]}
    return known | table


def _without_duplicates(kind: type[SpecModel], details: list[ErrorDetails]) -> list[ErrorDetails]:
    """Drop a missing setting if a misspelled one is close to it, and a list that is too short because of its items."""
    misspelled = [detail["loc"] for detail in details if detail["type"] == "extra_forbidden"]
    found = {(*loc[:-1], closest_name(str(loc[-1]), _fields_at(kind, loc[:-1]))) for loc in misspelled}
    within = {detail["loc"][:-depth] for detail in details for depth in range(1, len(detail["loc"]))}
    return [
        detail
        for detail in details
        if (detail["type"] != "missing" or detail["loc"] not in found)
        and (detail["type"] != "too_short" or detail["loc"] not in within)
    ]


def _problem(document: toml.TomlDocument, kind: type[SpecModel], detail: ErrorDetails) -> Problem:
    """A pydantic error as a problem: value, expectation, nearest name."""
    tagged = tuple(part for part in detail["loc"] if part != "[key]")
    loc = _in_file(tagged)
    value, suggestion = detail["input"], ""
    if detail["type"] == "extra_forbidden":
        message = "is not a setting"
        suggestion = suggest_name(str(loc[-1]), _fields_at(kind, tagged[:-1])) or _EVERY_KEY
    elif detail["type"] == "missing":
        message = "is missing"
        suggestion = _add(kind, tagged)
    elif detail["type"] == "literal_error":
        valid = [text.strip("'") for text in detail["ctx"]["expected"].replace(" or ", ", ").split(", ")]
        message = f"is {format_value(value)}, but must be one of {', '.join(valid)}"
        suggestion = suggest_name(str(value), valid)
    elif detail["type"] == "too_short":
        message = _mismatch(value, f"a list of {detail['ctx']['min_length']} or more")
    elif detail["type"] == "value_error":
        # A validator over a table starts with the field at fault: "`heads` must be …", and may add a line with a
        # suggestion.
        text, _, suggestion = str(detail["ctx"]["error"]).partition("\n")
        blamed, expected = _named_field(text)
        loc += blamed
        message = expected if blamed else _mismatch(value, expected)
    else:
        message = _mismatch(value, detail["msg"].removeprefix("Input should be "))
    return problem_at(*document.location(loc), format_key(loc) or "file", message, suggestion)


def _in_file(loc: toml.KeyPath) -> toml.KeyPath:
    """A key path as in the file: pydantic inserts the tag of a union."""
    return loc[:1] + loc[2:] if len(loc) > 1 and loc[1] in _TAGS.get(loc[0], ()) else loc


def _named_field(text: str) -> tuple[tuple[str, ...], str]:
    found = re.match(r"`([\w.]+)` (must .*)", text)
    return (tuple(found[1].split(".")), found[2]) if found else ((), text)


def _mismatch(value: Any, expected: str) -> str:
    return f"is {format_value(value)}, but must be {expected}"


def _add(kind: type[SpecModel], loc: toml.KeyPath) -> str:
    """How to add a setting that is missing: a line of a table, or a table."""
    is_table, loc = bool(_fields_at(kind, loc)), _in_file(loc)
    if is_table:
        return f"add a table [[{loc[-1]}]]" if loc == ("levels",) else f"add a table [{format_key(loc)}]"
    names = ".".join(part for part in loc[:-1] if isinstance(part, str))
    table = f"[[{names}]]" if any(isinstance(part, int) for part in loc[-2:-1]) else f"[{names}]"
    return f"add `{loc[-1]} = …` to {table if names else 'the top of the file'}"


def _fields_at(kind: Any, loc: toml.KeyPath) -> list[str]:
    """Names of the valid settings in the table at `loc`; empty if its names are not fixed."""
    if kind is Recipe and loc[:2] == ("model", "own"):
        kind, loc = CustomModel, loc[2:]
    elif kind is Plan and loc[:2] == ("recompute", "layers"):
        kind, loc = RecomputeLayers, loc[2:]
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
    return isinstance(kind, type) and issubclass(kind, SpecModel)


def _inner(kind: Any) -> Any:
    """The description inside `X | None`, `tuple[X, ...]` or `Annotated[X, …]`; the first of several."""
    while get_origin(kind) in (Union, UnionType, tuple, Annotated):
        kind = next(arg for arg in get_args(kind) if arg not in (type(None), Ellipsis))
    return kind
