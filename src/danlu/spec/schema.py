"""JSON Schemas of the files, for editors that complete and check while one types."""

from typing import Any, Literal, get_args

from pydantic import TypeAdapter

from danlu.spec.catalogue import catalogue
from danlu.spec.cluster import Cluster
from danlu.spec.event import Event
from danlu.spec.plan import Plan
from danlu.spec.recipe import Recipe

Kind = Literal["recipe", "cluster", "plan", "event"]
KINDS: tuple[Kind, ...] = get_args(Kind)

Schema = dict[str, Any]
_DIALECT = "https://json-schema.org/draft/2020-12/schema"


def schema(kind: Kind) -> Schema:
    """The JSON Schema of one kind of file; of `events.jsonl` it is the schema of a line."""
    described: dict[Kind, Any] = {"recipe": Recipe, "cluster": Cluster, "plan": Plan, "event": Event}
    body = TypeAdapter(described[kind]).json_schema()
    if kind == "recipe":
        _allow_base(body)
    return {"$schema": _DIALECT, **body, "title": f"Danlu {kind}"}


def _allow_base(recipe: Schema) -> None:
    """What a model table builds on, a catalogue entry or the model of weights, says the fields that it leaves out."""
    model, moe = recipe["$defs"]["Model"], recipe["$defs"]["Moe"]
    model["properties"]["base"] = {
        "type": "string",
        "enum": list(catalogue("models")),
        "description": "Model of the catalogue whose fields this table takes over, and may change.",
    }
    whole = {"required": model.pop("required"), "properties": {"moe": {"required": moe.pop("required")}}}
    recipe["required"].remove("model")
    alone = {"required": ["model"], "properties": {"model": {"anyOf": [{"required": ["base"]}, whole]}}}
    recipe["anyOf"] = [{"required": ["weights"]}, alone]
