"""JSON Schemas of the files, for completion and checks in editors."""

from typing import Any, Literal, get_args

from pydantic import TypeAdapter

from danlu.spec.catalog import catalog_entries
from danlu.spec.cluster import Cluster
from danlu.spec.event import Event
from danlu.spec.plan import Plan
from danlu.spec.quantity import format_quantity
from danlu.spec.recipe import Recipe

FileKind = Literal["recipe", "cluster", "plan", "event"]
FILE_KINDS: tuple[FileKind, ...] = get_args(FileKind)

Schema = dict[str, Any]
_DIALECT = "https://json-schema.org/draft/2020-12/schema"


def json_schema(kind: FileKind) -> Schema:
    """The JSON Schema of one kind of file; of `events.jsonl` it is the schema of a line."""
    described: dict[FileKind, Any] = {"recipe": Recipe, "cluster": Cluster, "plan": Plan, "event": Event}
    body = TypeAdapter(described[kind]).json_schema()
    if kind == "recipe":
        _allow_base(body)
    _write_quantities(body)
    return {"$schema": _DIALECT, **body, "title": f"Danlu {kind}"}


def _write_quantities(body: Any) -> None:
    """Write defaults of quantities as in a file, with their units."""
    if isinstance(body, dict):
        if "x-unit" in body and isinstance(body.get("default"), int | float):
            body["default"] = format_quantity(body["default"], body["x-unit"])
        for inner in body.values():
            _write_quantities(inner)
    elif isinstance(body, list):
        for inner in body:
            _write_quantities(inner)


def _allow_base(recipe: Schema) -> None:
    """Make fields optional that a base, a catalog entry or the model of imported weights, provides."""
    model, moe = recipe["$defs"]["Model"], recipe["$defs"]["Moe"]
    model["properties"]["base"] = {
        "type": "string",
        "enum": list(catalog_entries("models")),
        "description": "Model of the catalog whose fields this table inherits and may override.",
    }
    complete = {"required": model.pop("required"), "properties": {"moe": {"required": moe.pop("required")}}}
    recipe["required"].remove("model")
    alone = {"required": ["model"], "properties": {"model": {"anyOf": [{"required": ["base"]}, complete]}}}
    recipe["anyOf"] = [{"required": ["weights"]}, alone]
