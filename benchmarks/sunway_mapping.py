"""Experts across supernodes or inside them? What the cost model says on the Sunway machine, and where it turns.

    python benchmarks/sunway_mapping.py [--quick] [--svg docs/pictures/sunway-mapping.svg]

First the catalog's 14.5 T model on all 96,000 processors, with its experts across supernodes, over everything, and
inside. Then a grid: 256 supernodes of 256, a layer's 512 experts over 256 ranks, sweeping the tokens of a rank and the
width of an expert. Three mappings of the same 256 ranks: across (one in every supernode; an expert's states are sharded
inside), inside (all in one supernode; states sharded across), and half and half. Every mapping uses the best recompute
and sharding that fit. Prints tables and a line of JSON, and draws the grid.
"""

import argparse
import json
from dataclasses import replace
from html import escape
from pathlib import Path

from rich.console import Console
from rich.table import Table

from danlu.planner import PlanRequest, PricedPlan, price_plan, search
from danlu.planner.request import parse_constraints
from danlu.spec.cluster import Cluster
from danlu.spec.load import load_cluster, load_model, load_recipe
from danlu.spec.model import Model
from danlu.spec.plan import Degrees, Plan
from danlu.spec.recipe import BatchConfig, DataConfig, PrecisionConfig, Recipe

ROOT = Path(__file__).parents[1]
RANKS, SUPERNODES = 256, 256
PLACES = {
    "across": {"fabric": 256},
    "half and half": {"supernode": 16, "fabric": 16},
    "inside": {"supernode": 256},
}
TOKENS = (64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
WIDTHS = (768, 1536, 3072, 6144, 12288, 24576)


def main() -> None:
    """Print both studies and draw the grid."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--quick", action="store_true", help="a field of 3 × 2, and no search")
    arguments.add_argument("--svg", type=Path, help="draw the field into this file")
    asked = arguments.parse_args()
    whole = [] if asked.quick else _whole_machine()
    tokens, widths = (TOKENS[::4], WIDTHS[::4]) if asked.quick else (TOKENS, WIDTHS)
    field = [_cell(count, width) for width in widths for count in tokens]
    _show(whole, field, tokens, widths)
    if asked.svg:
        asked.svg.write_text(_svg(field, tokens, widths), encoding="utf-8")
    print(json.dumps({"machine": whole, "field": field}))


def _whole_machine() -> list[dict[str, object]]:
    """The catalog's model on all processors, its experts mapped in four ways; each with the best of all else."""
    recipe, cluster = load_recipe(ROOT / "recipes" / "bagualu.toml"), load_cluster("sunway")
    question = PlanRequest(recipe=recipe, cluster=cluster, chips=cluster.chips)
    ways = {
        "across 375 supernodes, 1 in each (ep 375)": "ep=375",
        "across 375 supernodes, 2 in each (ep 750)": "ep=750",
        "across 375 supernodes, 32 in each (ep 12,000)": "ep=12000",
        "inside one supernode (ep 32)": "ep=32",
        "32 in each of 15 supernodes (ep 480)": "ep=480",
    }
    found = []
    for name, fix in ways.items():
        answer = search(replace(question, constraints=parse_constraints(fix)), shown=1)
        best = answer.best[0] if answer.best else answer.least_memory
        assert best is not None
        found.append(
            {
                "way": name,
                "fits": bool(answer.best),
                "seconds": best.seconds,
                "bytes": best.peak_bytes,
                "degrees": best.plan.degrees.model_dump(),
                "parts": best.prediction.parts,
            }
        )
    return found


def _machine() -> Cluster:
    values = load_cluster("sunway").model_dump()
    values["levels"][2]["fanout"] = SUPERNODES
    return Cluster.model_validate(values | {"name": f"sunway, {SUPERNODES} supernodes"})


def _recipe(tokens: int, width: int) -> Recipe:
    model: Model = load_model("bagualu-14t-like")
    assert model.moe is not None
    moe = model.moe.model_copy(update={"experts": 2 * RANKS, "width": width})
    length, world = min(1024, tokens), RANKS * SUPERNODES
    return Recipe(
        name="field",
        steps=1,
        model=model.model_copy(update={"moe": moe}),
        data=DataConfig(shards="none"),
        batch=BatchConfig(sequences=world * tokens // length, length=length),
        precision=PrecisionConfig(compute="bf16"),
    )


def _cell(tokens: int, width: int) -> dict[str, object]:
    cluster = _machine()
    question = PlanRequest(recipe=_recipe(tokens, width), cluster=cluster, chips=cluster.chips)
    found: dict[str, object] = {"tokens": tokens, "width": width}
    for name, place in PLACES.items():
        best = _best(question, place)
        found[name] = best.seconds if best else None
    return found


def _best(question: PlanRequest, place: dict[str, int]) -> PricedPlan | None:
    """The best recompute, sharding and number of microbatches of one mapping; None if none fits."""
    held = question.recipe.batch.sequences // question.chips
    choices = []
    for recompute in ("none", "selective", "full"):
        for reshards in (True, False):
            for microbatches in {1, held}:
                plan = Plan(
                    degrees=Degrees(shard=question.chips, ep=RANKS),
                    mapping={"shard": {"supernode": 256, "fabric": SUPERNODES}, "ep": place},
                    microbatches=microbatches,
                    recompute=recompute,  # type: ignore[arg-type]
                    reshard_after_forward=reshards,
                )
                choices.append(price_plan(question, plan))
    fitting = [choice for choice in choices if choice.fits]
    return min(fitting, key=lambda choice: choice.seconds, default=None)


def _gain(cell: dict[str, object], over: str) -> float | None:
    """How much faster `across` is than another mapping."""
    mine, other = cell["across"], cell[over]
    return float(other) / float(mine) if mine and other else None  # type: ignore[arg-type]


def _show(
    whole: list[dict[str, object]], field: list[dict[str, object]], tokens: tuple[int, ...], widths: tuple[int, ...]
) -> None:
    console = Console(width=150)
    if whole:
        table = Table("96,000 processors, 14.5 T parameters", "step", "experts' traffic", "gathers", "fullest chip")
        for row in whole:
            parts = row["parts"]
            assert isinstance(parts, dict)
            table.add_row(
                str(row["way"]),
                f"{row['seconds']:.2f} s",
                f"{parts['expert']:.2f} s",
                f"{parts['gather']:.2f} s",
                f"{float(str(row['bytes'])) / 1e9:.0f} GB" + ("" if row["fits"] else ", does not fit"),
            )
        console.print(table)
    for over in ("half and half", "inside"):
        table = Table(f"across against {over}: gain", *(f"{count:,} tokens" for count in tokens))
        for width in widths:
            cells = [cell for cell in field if cell["width"] == width]
            table.add_row(f"expert of {width:,}", *(_gain_text(cell, over) for cell in cells))
        console.print(table)


def _gain_text(cell: dict[str, object], over: str) -> str:
    gain = _gain(cell, over)
    if gain is not None:
        return f"{gain:.2f}×"
    return "neither fits" if not cell["across"] and not cell[over] else f"only {'across' if cell['across'] else over}"


def _svg(field: list[dict[str, object]], tokens: tuple[int, ...], widths: tuple[int, ...]) -> str:
    """The grid: warm where experts across supernodes win over experts inside, cold where they lose."""
    wide, high, left, top = 78, 34, 120, 54
    width, height = left + wide * len(tokens) + 10, top + high * len(widths) + 46
    parts = [
        '<text x="10" y="22" font-weight="600">Experts across supernodes against experts inside: '
        "step time, inside over across</text>"
    ]
    for cell in field:
        x = left + tokens.index(int(str(cell["tokens"]))) * wide
        y = top + (len(widths) - 1 - widths.index(int(str(cell["width"])))) * high
        gain, text = _gain(cell, "inside"), _gain_text(cell, "inside")
        colour = "#d9d9d9"
        if gain is not None:
            depth = min(1.0, abs(gain - 1) * 0.9 if gain > 1 else abs(1 / gain - 1) * 0.9)
            hue = (214, 91, 37) if gain > 1 else (46, 111, 168)
            colour = "#" + "".join(f"{round(255 + (channel - 255) * (0.12 + 0.88 * depth)):02x}" for channel in hue)
        parts.append(f'<rect x="{x}" y="{y}" width="{wide - 2}" height="{high - 2}" rx="4" fill="{colour}"/>')
        parts.append(f'<text x="{x + wide / 2 - 1}" y="{y + 21}" text-anchor="middle">{escape(text)}</text>')
    for index, count in enumerate(tokens):
        x, y = left + index * wide + wide / 2, top + high * len(widths) + 18
        parts.append(f'<text x="{x}" y="{y}" text-anchor="middle">{count:,}</text>')
    parts.append(f'<text x="{left}" y="{height - 8}">tokens a rank and step</text>')
    for index, one in enumerate(reversed(widths)):
        parts.append(f'<text x="{left - 8}" y="{top + index * high + 21}" text-anchor="end">{one:,}</text>')
    parts.append(f'<text x="10" y="{top - 10}">width of an expert</text>')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
        f'font-size="13">{"".join(parts)}</svg>\n'
    )


if __name__ == "__main__":
    main()
