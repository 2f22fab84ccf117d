"""Tables and pages that are made from reports, whole: `<!-- made: parity.json layouts -->` … `<!-- /made -->`."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

Report = dict[str, Any]


def table(columns: str, rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown; a column whose name ends in `:` is aligned to the right."""
    names = columns.split("|")
    rules = ["--:" if name.endswith(":") else "---" for name in names]
    lines = [[name.removesuffix(":") for name in names], rules, *rows]
    return "\n".join(f"| {' | '.join(line)} |" if line is not rules else f"|{'|'.join(line)}|" for line in lines)


def percent(share: float, sign: str = "") -> str:
    """A share of one, to a tenth of a percent."""
    return f"{100 * share:{sign}.1f} %"


def size(count: float) -> str:
    """Bytes in MB or GB."""
    return f"{count / 1e6:.1f} MB" if count < 1e9 else f"{count / 1e9:.1f} GB"


def parity_layouts(report: Report) -> str:
    """Worst deviations of every layout."""
    rows = (
        [name, str(found["ranks"]), *(f"{found[key]:.1e}" for key in ("loss", "norm", "parameters"))]
        for name, found in report["figures"]["by layout"].items()
    )
    return table("layout|ranks:|loss:|norm:|parameters:", rows)


def parity_fp8(report: Report) -> str:
    """The same of layouts with quantized products, and of their first steps; none before a report has them."""
    keys = ("first loss", "first norm", "loss", "norm", "parameters")
    rows = (
        [name, str(found["ranks"]), *(f"{found[key]:.1e}" for key in keys)]
        for name, found in report["figures"].get("fp8", {}).items()
    )
    return table("layout|ranks:|first loss:|first norm:|loss:|norm:|parameters:", rows)


def answers(report: Report) -> str:
    """Layouts that the planner finds, beside published ones."""
    rows = []
    for row in report["figures"]["rows"]:
        cells = []
        for found in (row["answer"], row["published_here"]):
            cells += [f"{found['layout']}, recompute {found['recompute']}", f"{found['seconds']:.1f} s"]
        rows.append([row["question"], *cells, row["published"], f"{row['published_seconds']:.1f} s"])
    return table("question|Danlu's answer|a step:|the published layout, in Danlu|a step:|published|a step:", rows)


def validate_bars(report: Report) -> str:
    """What is asked of predictions."""
    rows = []
    for name, bar in report["figures"]["bars"].items():
        sign = "≥" if bar["at_least"] else "≤"
        values = (bar["value"], bar["first_values"], bar["first_columns"])
        if bar["unit"] == "%":
            (measured, first, bare), asked = map(percent, values), f"{sign} {100 * bar['limit']:g} %"
        elif bar["at_least"]:
            (measured, first, bare), asked = (f"{value:.2f}" for value in values), f"{sign} {bar['limit']:g}"
        else:
            (measured, first, bare), asked = (f"{value:.0f}" for value in values), f"{sign} {bar['limit']:.0f}"
        rows.append([name, first, bare, measured, asked, "reached" if bar["reached"] else "**missed**"])
    return table("target|first values:|first columns:|measured:|limit:|", rows)


def validate_sets(report: Report) -> str:
    """How far predictions are off, set by set."""
    rows = [
        [
            f"`{name}`",
            str(found["runs"]),
            percent(found["error"]),
            percent(found["bias"], "+"),
            str(found["memory_runs"] or ""),
            percent(found["memory_error"]) if found["memory_runs"] else "",
            str(found["out_of_memory"] or ""),
            str(found["false_fits"]) if found["out_of_memory"] else "",
            str(found["false_refusals"] or ""),
        ]
        for name, found in report["figures"]["sets"].items()
    ]
    return table("set|runs:|error:|bias:|memory:|error:|OOM:|false fit:|false OOM:", rows)


def validate_groups(report: Report) -> str:
    """How well layouts are put in order."""
    rows = [
        [group["name"], str(group["runs"]), f"{group['spearman']:.2f}", percent(group["regret"])]
        for found in report["figures"]["sets"].values()
        for group in found["groups"]
    ]
    return table("runs that differ only in their layout|runs:|rank correlation:|regret:", rows)


def plan_truth_rows(place: str) -> Callable[[Report], str]:
    """The layouts of one part, fastest first."""

    def made(report: Report) -> str:
        rows = [row for row in report["figures"]["rows"] if row["place"] == place]
        return table(
            "layout|ranks:|predicted:|measured:|fastest to slowest:|error:",
            (
                [
                    f"`{row['layout']}`",
                    str(row["ranks"]),
                    f"{row['predicted']:.2f} s",
                    f"{row['measured']:.2f} s",
                    f"{row['fastest']:.2f} to {row['slowest']:.2f} s",
                    percent(row["error"], "+"),
                ]
                for row in sorted(rows, key=lambda row: float(row["measured"]))
            ),
        )

    return made


def plan_scale_searches(report: Report) -> str:
    """Large searches."""
    rows = (
        [row["name"], f"{row['chips']:,}", f"{row['layouts']:,}", f"{row['priced']:,}", f"{row['cpu_seconds']:.1f}"]
        for row in report["figures"]["large"]
    )
    return table("question|chips:|layouts:|priced in full:|seconds:", rows)


def dryrun_truth_layouts(report: Report) -> str:
    """Dry and real, layout by layout."""
    rows = []
    for row in report["figures"]["rows"]:
        same = "yes" if row["same"] else "but sizes of all-to-alls" if row["same_kinds"] else "**no**"
        apart = row["dry"] - row["real"]
        difference = "0" if not apart else f"{apart:+} B" if abs(apart) < 1024 else f"{100 * row['difference']:+.2f} %"
        ratio = f"{row['resident_ratio']:.1f} ×"
        sizes = [size(row["dry"]), size(row["real"]), difference, f"+{size(row['resident'])}", ratio]
        rows.append([row["layout"], str(row["ranks"]), f"{row['calls']:,}", same, *sizes])
    return table("layout|ranks:|collectives:|the same|peak dry:|peak real:|difference:|resident:|of the peak:", rows)


_JOBS = {
    "llama3-70b": ("Llama 3 70B", "pp 4 · replicate 16 · shard 8 · tp 8"),
    "llama3-405b": ("Llama 3 405B", "pp 16 · replicate 8 · shard 16 · tp 8"),
    "deepseek": ("DeepSeek-V3-like", "pp 16 · shard 128 · ep 64"),
    "bagualu": ("BaGuaLu-like, 14.5 T", "shard 96,000 · ep 375"),
    "growth": ("the same layers a rank", "shard 64 · tp 8, and replicas"),
}


def dryrun_scale_jobs(report: Report) -> str:
    """What a dry run of published jobs takes."""
    jobs: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for rank in report["figures"]["ranks"]:
        jobs.setdefault((rank["case"], rank["world"]), []).append(rank)
    rows = (
        [
            _JOBS[case][0],
            f"{world:,}",
            _JOBS[case][1],
            _span([rank["seconds"] for rank in ranks], "{:.0f}"),
            _span([rank["resident"] / 1e9 for rank in ranks], "{:.2f}") + " GB",
            _span([rank["peak"] / 1e9 for rank in ranks], "{:.0f}") + " GB",
        ]
        for (case, world), ranks in jobs.items()
    )
    return table("job|ranks:|layout|seconds a rank:|resident:|peak of the rank:", rows)


def _span(values: list[float], form: str) -> str:
    low, high = form.format(min(values)), form.format(max(values))
    return low if low == high else f"{low} – {high}"


def full_parts(report: Report) -> str:
    """The last result of every part of `.ci/full`."""
    rows = (
        [
            name,
            f"{row['seconds']:,} s",
            "passed" if row["passed"] else "**failed**",
            row["date"],
            f"`{row['commit'][:10]}`",
        ]
        for name, row in report["figures"]["parts"].items()
    )
    return table("part|time:|result|date|commit", rows)


def torch_minors(report: Report) -> str:
    """What every minor of torch passed."""
    rows = []
    for version, row in sorted(
        report["figures"]["minors"].items(), key=lambda item: [int(part) for part in item[0].split(".")]
    ):
        tests, layouts = row.get("tests"), row.get("layouts")
        rows.append(
            [
                version,
                *_minor_part(tests),
                *_minor_part(layouts),
                f"{layouts['loss']:.1e}" if layouts and "loss" in layouts else "",
            ]
        )
    return table("torch|tests:|on|layouts like one process:|on|largest deviation of a loss:", rows)


def _minor_part(part: dict[str, Any] | None) -> list[str]:
    return ["not run", ""] if part is None else [f"{part['passed']:,} of {part['ran']:,}", part["date"]]


def dispatch_in_parts(report: Report) -> str:
    """A layer of experts by link and number of parts."""
    rows = [
        [
            row["link"],
            str(row["parts"]),
            *(_milliseconds(row[name]) for name in ("seconds", "experts", "ways")),
            f"{row['faster']:.2f} × ({row['low']:.2f} to {row['high']:.2f})",
        ]
        for row in report["figures"]["rows"]
    ]
    return table("link|parts:|a layer:|its experts alone:|its ways alone:|faster (quartiles):", rows)


def host_collectives(report: Report) -> str:
    """Collectives inside a host, through its memory and over gloo."""
    rows = [
        [
            row["operation"],
            str(row["ranks"]),
            _binary(row["bytes"]),
            *(_milliseconds(row[name]) for name in ("memory", "gloo")),
            f"{row['ratio']:.1f} ×",
        ]
        for row in report["figures"]["rows"]
        if row["bytes"] in (8 << 10, 32 << 20)
    ]
    return table("collective|ranks:|tensor:|Danlu:|gloo:|faster:", rows)


def level_collectives(report: Report) -> str:
    """Collectives over a trimmed trunk, by every method, beside what the trunk alone takes."""
    cases: dict[tuple[str, int, int], dict[str, Any]] = {}
    for row in report["figures"]["rows"]:
        if row["bytes"] in (4 << 10, 4 << 20, 64 << 20, 256 << 20):
            case = cases.setdefault((row["operation"], row["ranks"], row["bytes"]), {"bound": row["bound"]})
            case[row["method"]] = row
    rows = [
        [
            operation,
            str(ranks),
            _binary(size),
            *(_milliseconds(case[method]["seconds"]) for method in ("by level", "by host", "gloo", "Open MPI")),
            _milliseconds(case["bound"]),
        ]
        for (operation, ranks, size), case in cases.items()
    ]
    return table("collective|ranks:|tensor:|by level:|by host:|gloo:|Open MPI:|the trunk alone:", rows)


def _binary(size: int) -> str:
    return f"{size / 1024:.0f} KiB" if size < 1 << 20 else f"{size / (1 << 20):.0f} MiB"


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:,.{2 if seconds < 0.01 else 0}f} ms"


def step_speed(report: Report) -> str:
    """Seconds of a step, by contender, and how much faster the better of Danlu's two is."""
    cases: dict[tuple[str, int], dict[str, Any]] = {}
    for row in report["figures"]["rows"]:
        cases.setdefault((row["model"], row["ranks"]), {})[row["contender"]] = row
    names = ("PyTorch", "PyTorch compiled", "Danlu", "Danlu compiled")
    rows = []
    for (model, ranks), case in cases.items():
        ours = min(case[name]["seconds"] for name in names[2:])
        seconds = [f"{case[name]['seconds']:.2f} s" for name in names]
        gains = [f"{case[name]['seconds'] / ours:.2f} ×" for name in names[:2]]
        rows.append([model, str(ranks), *seconds, *gains, f"{max(case[name]['mfu'] for name in names[2:]):.0%}"])
    columns = "|".join(f"{name}:" for name in names)
    return table(f"model|ranks:|{columns}|over eager:|over compiled:|MFU:", rows)


def expert_layer(report: Report) -> str:
    """An expert layer by the loop, by torch's grouped product and by Danlu's."""
    rows = [
        [row["case"], *(_milliseconds(row[way]) for way in ("loop", "grouped_mm", "Danlu")), f"{row['faster']:.2f} ×"]
        for row in report["figures"]["rows"]
    ]
    return table("layer|loop:|grouped_mm:|Danlu:|over the loop:", rows)


def routers(report: Report) -> str:
    """Learned routers side by side."""
    rows = [
        [
            name,
            *(f"{row[key]:.3f}" for key in ("loss", "held_out")),
            *(f"{row[key]:.2f}" for key in ("load", "most_load")),
            str(row["dropped"]),
            f"{row['tokens_per_second']:,.0f} ({row['slow_tenth']:,.0f} to {row['fast_tenth']:,.0f})",
        ]
        for name, row in report["figures"]["rows"].items()
    ]
    return table("balance|loss:|held-out loss:|load:|in the worst step:|dropped:|tokens/s (eight of ten steps):", rows)


def attention_masks(report: Report) -> str:
    """Attention of documents and windows, beside torch's with a mask."""
    ways = ("mask", "causal", "Danlu")
    rows = [
        [row["case"], *(_milliseconds(row[way]) for way in ways), f"{row['faster']:.1f} ×"]
        for row in report["figures"]["rows"]
    ]
    return table("forward and backward|torch, a mask:|torch, causal:|Danlu:|over a mask:", rows)


def operator_gain(report: Report) -> str:
    """What implementations gain in a step, as predicted and as measured."""
    rows = [
        [
            f"`{row['operator']}`",
            f"{row['times_faster']:.1f} ×",
            _milliseconds(row["predicted"]),
            _milliseconds(row["measured"]),
            f"{_milliseconds(row['low'])} to {_milliseconds(row['high'])}",
            percent(row["error"], "+"),
        ]
        for row in report["figures"]["rows"]
    ]
    return table("operator|faster than torch:|gain predicted:|measured:|nine of ten samples:|off by:", rows)


def kernel_resources(report: Report) -> str:
    """Registers, shared memory and matrix instructions of every kernel on every target."""
    results = report["figures"]["kernels"]
    targets = list(next(iter(results.values())))
    rows = [[f"`{name}`", *(_resources(found[target]) for target in targets)] for name, found in results.items()]
    return table("|".join(["kernel", *targets]), rows)


def _resources(found: Report) -> str:
    figures = [found["registers"], round(found["shared_bytes"] / 1024), found["matrix_instructions"]]
    return " · ".join(str(each) for each in (figures if figures[-1] else figures[:-1]))


MADE: dict[str, Callable[[Report], str]] = {
    "attention_masks.json table": attention_masks,
    "expert_layer.json table": expert_layer,
    "operator_gain.json table": operator_gain,
    "kernel_resources.json table": kernel_resources,
    "step_speed.json table": step_speed,
    "collectives.json table": level_collectives,
    "host_collectives.json table": host_collectives,
    "full.json parts": full_parts,
    "torch.json minors": torch_minors,
    "routers.json table": routers,
    "dispatch_overlap.json parts": dispatch_in_parts,
    "parity.json layouts": parity_layouts,
    "parity.json fp8": parity_fp8,
    "validate.json bars": validate_bars,
    "answers.json answers": answers,
    "validate.json sets": validate_sets,
    "validate.json groups": validate_groups,
    "plan_truth.json machine": plan_truth_rows("machine"),
    "plan_truth.json supernodes": plan_truth_rows("supernodes"),
    "plan_scale.json searches": plan_scale_searches,
    "dryrun_truth.json layouts": dryrun_truth_layouts,
    "dryrun_scale.json jobs": dryrun_scale_jobs,
}
"""What may stand behind `made:`; the first word is the report."""


def index(reports: dict[str, Report]) -> str:
    """All reports with the commands that made them."""
    rows = (
        [f"[`{name}`]({name})", f"`{report['command']}`", f"`{report['commit'][:10]}`", report["date"][:10]]
        for name, report in sorted(reports.items())
    )
    return table("report|command|commit|date", rows)
