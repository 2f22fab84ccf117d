"""How long `danlu plan` takes for published jobs and 100,000 chips, and whether it equals exhaustive pricing.

    python benchmarks/plan_scale.py           # five large requests, and small ones compared with exhaustive pricing
    python benchmarks/plan_scale.py --quick   # one large request, two small ones
    python benchmarks/plan_scale.py --report FILE

A search must take less than 60 seconds of one core. Prints a table and a line of JSON; exits with 1 if a bar is missed.
"""

import argparse
import json
import sys
from pathlib import Path
from time import process_time

from reports import add_report_option, write_report
from rich.console import Console
from rich.table import Table

from danlu.cost import count_parameters
from danlu.planner import PlanRequest, SearchResult, search, search_exhaustively
from danlu.spec.cluster import Cluster
from danlu.spec.load import load_cluster, load_recipe
from danlu.spec.model import Model, Moe
from danlu.spec.recipe import BatchConfig, DataConfig, PrecisionConfig, Recipe

LIMIT = 60.0
"""Seconds of one core."""
RECIPES = Path(__file__).parent.parent / "recipes"


def main() -> int:
    """Run every request and print the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one large question, two small ones")
    add_report_option(parser)
    arguments = parser.parse_args()
    large = [_searched(name, question) for name, question in _large(arguments.quick)]
    small = [_compared(name, question) for name, question in _small(arguments.quick)]
    _show(large, small)
    summary = {"limit": LIMIT, "large": large, "small": small}
    print(json.dumps(summary))
    write_report(arguments.report, "plan_scale", summary)
    slow = [row["name"] for row in large if row["cpu_seconds"] > LIMIT or not row["found"]]
    wrong = [row["name"] for row in small if not row["same"]]
    for name in (*slow, *wrong):
        print(f"missed: {name}", file=sys.stderr)
    return 1 if slow or wrong else 0


def _large(quick: bool) -> list[tuple[str, PlanRequest]]:
    pod, sunway = load_cluster("h100-pod"), load_cluster("sunway")
    chips = 1024 if quick else 4096  # far enough from the limit that a busy machine does not miss it
    found = [
        ("llama3-70b", PlanRequest(recipe=load_recipe(RECIPES / "llama3-70b.toml"), cluster=pod, chips=chips)),
        ("llama3-405b", PlanRequest(recipe=load_recipe(RECIPES / "llama3-405b.toml"), cluster=pod, chips=16384)),
        ("deepseek-v3-like", PlanRequest(recipe=load_recipe(RECIPES / "deepseek.toml"), cluster=pod, chips=2048)),
        ("bagualu", PlanRequest(recipe=load_recipe(RECIPES / "bagualu.toml"), cluster=sunway, chips=96000)),
        ("10^14 parameters", PlanRequest(recipe=_hundred_trillion(), cluster=_hundred_thousand(), chips=100_000)),
    ]
    return found[:1] if quick else found


def _hundred_trillion() -> Recipe:
    """A mixture of experts of 10^14 parameters; its shape is chosen here."""
    model = Model(
        name="100t",
        vocabulary=128000,
        layers=80,
        width=16384,
        heads=128,
        kv_heads=16,
        mlp_width=65536,
        sequence=8192,
        moe=Moe(experts=3125, top_k=4, width=8192),
    )
    return Recipe(
        name="100t",
        steps=1000,
        model=model,
        data=DataConfig(shards="none"),
        batch=BatchConfig(sequences=100_000, length=4096),
        precision=PrecisionConfig(compute="bf16"),
    )


def _hundred_thousand() -> Cluster:
    """100,000 chips of the catalog's pod, in nodes of 8, pods of 2,000 and 50 pods behind a tapered layer."""
    values = load_cluster("h100-pod").model_dump() | {"name": "100k"}
    values["levels"][1]["fanout"], values["levels"][2]["fanout"] = 250, 50
    return Cluster.model_validate(values)


def _small(quick: bool) -> list[tuple[str, PlanRequest]]:
    dense = Model(vocabulary=32000, layers=8, width=2048, heads=16, kv_heads=8, mlp_width=8192, sequence=4096)
    experts = dense.model_copy(update={"moe": Moe(experts=8, top_k=2, width=4096)})
    found = []
    for name, model in (("dense", dense), ("experts", experts)):
        for memory in (80e9, 12e9, 7.5e9):
            for slow in (50e9, 2e9):
                title = f"{name}, {memory / 1e9:g} GB, {slow / 1e9:g} GB/s"
                found.append((title, _small_question(model, memory, slow)))
    return found[:1] + found[6:7] if quick else found


def _small_question(model: Model, memory: float, slow: float) -> PlanRequest:
    values = load_cluster("dgx-a100").model_dump() | {"name": "small"}
    values["chip"]["memory"] = round(memory)
    values["levels"] = [
        {"name": "node", "fanout": 4, "bandwidth": 300e9, "latency": 3e-6},
        {"name": "rack", "fanout": 2, "bandwidth": slow, "latency": 6e-6, "oversubscription": 2.0},
    ]
    recipe = Recipe(
        name="small",
        steps=1,
        model=model,
        data=DataConfig(shards="none"),
        batch=BatchConfig(sequences=16, length=2048),
        precision=PrecisionConfig(compute="bf16"),
    )
    return PlanRequest(recipe=recipe, cluster=Cluster.model_validate(values), chips=8)


def _searched(name: str, question: PlanRequest) -> dict[str, object]:
    begin = process_time()
    answer: SearchResult = search(question)
    taken = process_time() - begin
    best = answer.best[0] if answer.best else None
    return {
        "name": name,
        "parameters": count_parameters(question.model),
        "chips": question.chips,
        "layouts": answer.layouts_searched,
        "priced": answer.priced,
        "cpu_seconds": round(taken, 1),
        "wall_seconds": round(answer.seconds, 1),
        "found": best is not None,
        "step": best.seconds if best else None,
        "mfu": best.mfu if best else None,
        "degrees": best.plan.degrees.model_dump() if best else None,
    }


def _compared(name: str, question: PlanRequest) -> dict[str, object]:
    best, found = search_exhaustively(question), search(question, shown=1)
    chosen = found.best[0] if found.best else None
    same = (best is None) == (chosen is None) and (best is None or chosen is None or best.plan == chosen.plan)
    return {
        "name": name,
        "layouts": found.layouts_searched,
        "priced": found.priced,
        "fits": best is not None,
        "same": same,
    }


def _show(large: list[dict[str, object]], small: list[dict[str, object]]) -> None:
    console = Console(width=150)
    table = Table("question", "parameters", "chips", "layouts", "priced", "one core", "wall", "step", "MFU", "layout")
    for row in large:
        degrees = row["degrees"]
        shown = " ".join(f"{axis} {n}" for axis, n in degrees.items() if n > 1) if isinstance(degrees, dict) else "none"
        table.add_row(
            str(row["name"]),
            f"{row['parameters']:.3g}",
            f"{row['chips']:,}",
            f"{row['layouts']:,}",
            f"{row['priced']:,}",
            f"{row['cpu_seconds']} s",
            f"{row['wall_seconds']} s",
            f"{row['step']:.3f} s" if row["step"] else "",
            f"{row['mfu']:.1%}" if row["mfu"] else "",
            shown,
        )
    console.print(table)
    same = sum(bool(row["same"]) for row in small)
    console.print(f"the same optimum as pricing every layout: {same} of {len(small)} small questions")


if __name__ == "__main__":
    sys.exit(main())
