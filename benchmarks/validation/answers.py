"""The planner's answers to four questions that others have answered with a machine, beside what they published.

    python benchmarks/validation/answers.py                                     # a minute or two
    python benchmarks/validation/answers.py --report docs/reports/answers.json

For every question: the layout that the search finds, the published layout under the same cost model (with the recompute
that it needs to fit, as Danlu runs it), and the published step time. docs/planner-truth.md discusses the differences.
"""

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from reports import add_report_option, write_report
from rich.console import Console
from rich.table import Table

from danlu.cost.parameter_count import flops_per_token
from danlu.cost.software import ALL_AT_ONCE, token_dispatch
from danlu.planner import PlanRequest, PricedPlan, search
from danlu.planner.request import parse_constraints
from danlu.spec.cluster import Cluster
from danlu.spec.load import load_cluster, load_recipe
from danlu.spec.recipe import Recipe

RECIPES = Path(__file__).resolve().parents[2] / "recipes"


@dataclass(frozen=True)
class Question:
    """A model on a machine, and what was published about it."""

    name: str
    request: PlanRequest
    published_layout: str
    """As `--fix` would say it."""
    published_words: str
    seconds: float
    """Of a step as published, scaled to this batch."""


def questions() -> Iterator[Question]:
    """Four questions."""
    yield Question(
        "Llama 3 405B on 16,384 H100",
        PlanRequest(recipe=load_recipe(RECIPES / "llama3-405b.toml"), cluster=load_cluster("h100-pod"), chips=16384),
        "tp=8,pp=16,cp=1",
        "tp 8 × pp 16 × dp 128, no recompute",
        # 400 TFLOP/s a chip (arXiv 2407.21783, Table 4), the causal half of attention counted
        6.46,
    )
    deepseek = load_recipe(RECIPES / "deepseek.toml")
    yield Question(
        "like DeepSeek-V3 on 2,048 H800",
        PlanRequest(recipe=deepseek, cluster=_h800(), chips=2048),
        "tp=1,pp=16,ep=64,cp=1",
        "pp 16 × ep 64 × ZeRO-1 over 128, fp8, DualPipe",
        # 180,000 H800 hours a 10^12 tokens (arXiv 2412.19437, section 1)
        180e3 * 3600 / 1e12 * deepseek.batch.sequences * deepseek.batch.length / 2048,
    )
    yield Question(
        "Llama 3 70B on 64 Ascend 910B",
        PlanRequest(
            recipe=_with_batch(load_recipe(RECIPES / "llama3-70b.toml"), 512),
            cluster=load_cluster("ascend-910b-pod"),
            chips=64,
        ),
        "tp=8,pp=4,cp=1",
        "tp 8 × pp 4 × dp 2 (MindSpeed-LLM)",
        185.65,  # benchmarks/validation/published/runs.csv, 0993
    )
    bagualu = load_recipe(RECIPES / "bagualu.toml")
    tokens = bagualu.batch.sequences * bagualu.batch.length
    yield Question(
        "14.5 T like BaGuaLu on 96,000 SW26010-Pro",
        PlanRequest(recipe=bagualu, cluster=load_cluster("sunway"), chips=96000),
        "tp=1,pp=1,cp=1,ep=12000",
        "experts across supernodes, data parallel inside, 18.9 % of the peak",
        # 1.002 EFLOP/s of 96,000 × 55.3 TFLOP/s (Ma et al., PPoPP 2022)
        tokens * flops_per_token(bagualu.model, bagualu.batch.length) / (0.189 * 96000 * 55.3e12),
    )


def _h800() -> Cluster:
    """The catalog's H100 pod with the H800's NVLink: 400 GB/s in both directions, and full bisection over 2,048."""
    values = load_cluster("h100-pod").model_dump() | {"name": "h800-pod"}
    values["chip"]["name"] = "H800-SXM-80GB"
    values["levels"][0]["bandwidth"] = 200e9
    return Cluster.model_validate(values)


def _with_batch(recipe: Recipe, sequences: int) -> Recipe:
    return recipe.model_copy(update={"batch": recipe.batch.model_copy(update={"sequences": sequences})})


def answer(question: Question) -> dict[str, Any]:
    """One row: the answer, the published layout here, and what was published."""
    request = question.request
    ours = search(request, shown=1)
    published = search(replace(request, constraints=parse_constraints(question.published_layout)), shown=1)
    row: dict[str, Any] = {
        "question": question.name,
        "published": question.published_words,
        "published_seconds": question.seconds,
    }
    for name, found in (("answer", ours), ("published_here", published)):
        best = found.best[0] if found.best else None
        row[name] = _row(best) if best else None
    return row


def _row(best: PricedPlan) -> dict[str, Any]:
    plan = best.plan
    degrees = " × ".join(f"{axis} {degree}" for axis, degree in plan.degrees.model_dump().items() if degree > 1)
    dispatch = token_dispatch(plan)
    tokens = f", tokens {dispatch.words}" if dispatch != ALL_AT_ONCE else ""
    return {
        "layout": f"{degrees}, {plan.microbatches} microbatches{tokens}",
        "recompute": str(plan.recompute),
        "regather": plan.regather_inputs,
        "seconds": best.seconds,
        "bytes": best.peak_bytes,
        "parts": {name: value for name, value in best.prediction.parts.items() if value > 0.01 * best.seconds},
        "assumptions": list(best.prediction.assumptions),
    }


def main() -> int:
    """Ask, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_report_option(parser)
    arguments = parser.parse_args()
    rows = []
    with Console(stderr=True).status("searching"):
        for question in questions():
            rows.append(answer(question))
    table = Table(
        "question", "Danlu's answer", "seconds", "the published layout, here", "seconds", "published", "seconds"
    )
    for row in rows:
        cells = []
        for name in ("answer", "published_here"):
            found = row[name]
            cells += [f"{found['layout']}, {found['recompute']}", f"{found['seconds']:.1f}"] if found else ["none", ""]
        table.add_row(row["question"], *cells, row["published"], f"{row['published_seconds']:.1f}")
    Console(width=None if sys.stdout.isatty() else 160).print(table)
    write_report(arguments.report, "answers", {"rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
