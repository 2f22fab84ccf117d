"""Writes the reference of every key of recipe, model, cluster and plan from the schemas of the files.

python docs/reference/make.py            # writes the pages
python docs/reference/make.py --check    # says which differ, and fails if one does
"""

import json
import sys
from pathlib import Path

from danlu.spec.schema import Schema, json_schema

HERE = Path(__file__).parent
_OPENING = {
    "recipe": (
        "Every key of recipe.toml",
        "What to train. `model` has [its own page](model.md). Paths are relative to the recipe.",
    ),
    "model": (
        "Every key of a model",
        "The table `[model]` of a recipe, or a file in the folder of `danlu import hf`. A model is described by its "
        "shape, or named by the code that builds it (`factory`). With `base`, the table inherits a model of the "
        "catalog and overrides single fields.",
    ),
    "cluster": (
        "Every key of cluster.toml",
        "The machine of a run. Quantities are strings with their units; a number without one is an error. `danlu "
        "probe` measures a machine and writes this file.",
    ),
    "plan": (
        "Every key of plan.toml",
        "How a run is laid out: written by hand or by `danlu plan --output`.",
    ),
}
_GENERATED = "<!-- Made by docs/reference/make.py from the descriptions in src/danlu/spec. -->"


def pages() -> dict[str, str]:
    """The text of every page, by name."""
    recipe, cluster, plan = json_schema("recipe"), json_schema("cluster"), json_schema("plan")
    found = {
        "recipe": _tables(recipe, recipe, "", {"model"}),
        "model": [
            *_tables(recipe, recipe["$defs"]["Model"], "model", set(), "A model by its shape"),
            *_tables(recipe, recipe["$defs"]["CustomModel"], "model", set(), "A model by its code"),
        ],
        "cluster": _tables(cluster, cluster, "", set()),
        "plan": _tables(plan, plan, "", set()),
    }
    return {name: _page(name, tables) for name, tables in found.items()}


def _page(name: str, tables: list[str]) -> str:
    title, opening = _OPENING[name]
    return "\n".join([f"# {title}", "", _GENERATED, "", opening, "", *tables]).rstrip() + "\n"


def _tables(root: Schema, table: Schema, path: str, skipped: set[str], title: str = "") -> list[str]:
    """A table of settings and, below it, those inside it."""
    heading = title or (f"`[{path}]`" if path else "Top of the file")
    lines = [f"## {heading}", "", _text(table.get("description", "")), ""]
    lines += ["| key | type | default | range | meaning |", "|---|---|---|---|---|"]
    required = _required(root, table)
    inner: list[str] = []
    for key, value in table["properties"].items():
        word, table_form = value.get("oneOf", (None, None)) if "default" in value else (None, None)
        if word:  # a word, or a table instead of it
            value = {**value, **word}
            del value["oneOf"]
        resolved, is_list = _resolved(root, table_form or value)
        below = f"[{path}.{key}]" if path else f"[{key}]"
        header = f"[{below}]" if is_list else below
        default = (
            "**required**" if key in required or "oneOf" in value else _default(value, bool(resolved and not word))
        )
        kind = f"table `{header}`" if resolved and not is_list else f"tables `{header}`" if resolved else _kind(value)
        kind = f"{_kind(value)}, or a {kind}" if word else kind
        lines.append(f"| `{key}` | {kind} | {default} | {_range(value)} | {_text(value.get('description', ''))} |")
        if resolved and key not in skipped:
            inner += _tables(root, resolved, f"{path}.{key}".strip("."), set(), f"`{header}`")
    return [*lines, "", *inner]


def _required(root: Schema, table: Schema) -> list[str]:
    """Required keys; those of a model only without a base."""
    by_shape = {"Model": ["vocabulary", "layers", "width", "heads"], "Moe": ["experts", "top_k", "width"]}
    return table.get("required") or by_shape.get(table.get("title", ""), [])


def _resolved(root: Schema, value: Schema) -> tuple[Schema, bool]:
    """The table under a key, if there is one, and whether it is a list of tables."""
    if "items" in value:
        return _resolved(root, value["items"])[0], True
    choices = [choice for choice in value.get("anyOf", [value]) if choice.get("type") != "null"]
    reference = choices[0].get("$ref", "") if len(choices) == 1 else ""
    return (root["$defs"][reference.rpartition("/")[2]], False) if reference else ({}, False)


def _kind(value: Schema) -> str:
    choices = [choice for choice in value.get("anyOf", [value]) if choice.get("type") != "null"]
    value = choices[0]
    if "enum" in value or "const" in value:
        return "one of"
    if "x-unit" in value:
        return f'string in {value["x-unit"]}, such as `"{value["examples"][0]}"`'
    if value.get("type") == "array":
        return f"list of {_kind(value['items'])}"
    if value.get("type") == "object" or "additionalProperties" in value:
        of = value.get("additionalProperties")
        return f"table of {_kind(of)}" if isinstance(of, dict) and of else "table"
    if "oneOf" in value or "$ref" in value:
        return "table"
    names = {"integer": "integer", "number": "number", "string": "string", "boolean": "boolean"}
    return names.get(value.get("type", ""), "any value")


def _default(value: Schema, is_table: bool) -> str:
    if is_table:
        return "" if value.get("default") in (None, []) else "its own defaults"
    default = value.get("default")
    return "" if default in (None, "", [], {}) else f"`{json.dumps(default, ensure_ascii=False)}`"


def _range(value: Schema) -> str:
    """Valid values: choices, bounds, a pattern."""
    choices = [choice for choice in value.get("anyOf", [value]) if choice.get("type") != "null"]
    value = choices[0]
    if "enum" in value:
        return ", ".join(f"`{choice}`" for choice in value["enum"])
    if "const" in value:
        return f"`{value['const']}`"
    if "x-least" in value:
        return f"{value['x-least']} to {value['x-most']}"
    if "additionalProperties" in value and isinstance(value["additionalProperties"], dict):
        keys = ", ".join(f"`{name}`" for name in value.get("propertyNames", {}).get("enum", []))
        inner = _range(value["additionalProperties"])
        return "; ".join(part for part in (f"keys {keys}" if keys else "", inner) if part)
    if value.get("type") == "array":
        few, many = value.get("minItems"), value.get("maxItems")
        return " ".join(
            part for part in (f"at least {few}" if few else "", f"at most {many:,}" if many else "") if part
        )
    bounds = [
        f"{word} {_figure(value[key])}"
        for key, word in (
            ("minimum", "from"),
            ("exclusiveMinimum", "above"),
            ("maximum", "to"),
            ("exclusiveMaximum", "below"),
        )
        if key in value
    ]
    if "pattern" in value and value.get("type") == "string":
        bounds.append(f"`{value['pattern']}`".replace("|", "\\|"))
    elif "maxLength" in value:
        bounds.append(f"at most {value['maxLength']} characters")
    return " ".join(bounds)


def _figure(number: float) -> str:
    if isinstance(number, int) and abs(number) >= 10**6 and str(number).strip("0") == "1":
        return f"10^{len(str(number)) - 1}"
    return f"{number:,}" if isinstance(number, int) else f"{number:g}"


def _text(description: str) -> str:
    return " ".join(description.split()).replace("|", "\\|")


def main(arguments: list[str]) -> int:
    """Write the pages, or compare them."""
    differing = []
    for name, text in pages().items():
        path = HERE / f"{name}.md"
        if "--check" in arguments:
            if not path.exists() or path.read_text(encoding="utf-8") != text:
                differing.append(path.name)
        else:
            path.write_text(text, encoding="utf-8")
    if differing:
        sys.stderr.write(f"{', '.join(differing)} differ from the schema: python docs/reference/make.py\n")
    return int(bool(differing))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
