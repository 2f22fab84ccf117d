"""Predictions compared with published runs: tables for the terminal, a page with a scatter plot, JSON."""

from collections.abc import Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from rich.console import Group as Stack
from rich.table import Table

from danlu.report import formatting
from danlu.report.chart import Scale, log_ticks
from validation.published_runs import load_held_out, load_runs, original_values
from validation.scores import DENSE, MOE, OTHER_CHIPS, RunComparison, SetScore, Target, ValidationReport

_SIZE = 620
"""Side of the scatter plot, in SVG units."""
_FAMILIES = (
    ("loss", "dense, on clusters", DENSE),
    ("norm", "mixture of experts", MOE),
    ("speed", "other chips", OTHER_CHIPS),
    ("rate", "other held-out runs", ()),
    ("fit", "fitted on", ()),
)
"""CSS color class, label, and sets."""
_STYLE = """
.scatter svg{width:100%;max-width:720px;display:block;margin:0 auto;overflow:visible}
.scatter text{fill:var(--soft);font-size:13px}.scatter .axis{stroke:var(--grid)}
.scatter .same{stroke:var(--soft);stroke-dasharray:6 5}.scatter .tenth{stroke:var(--faint)}
.scatter circle{fill:var(--tone);opacity:.6}.scatter .fit{--tone:var(--soft);opacity:.35}
.scatter .key i{width:10px;height:10px;border:0;border-radius:9px;background:var(--tone)}
td.missed{color:var(--bad)}td.reached{color:var(--good)}
"""


def validation_tables(validation: ValidationReport) -> Stack:
    """The sets, the groups and the targets as tables."""
    return Stack(
        _sets(validation),
        _groups(validation.scores),
        _small_groups(validation.scores),
        _bars(validation),
        _changes(),
    )


def validation_json(validation: ValidationReport) -> dict[str, Any]:
    """The same as JSON, with every run."""
    return {
        "passed": validation.passed,
        "bars": [
            {
                "name": bar.name,
                "value": bar.value,
                "first_values": first.value,
                "first_columns": bare.value,
                "limit": bar.limit,
                "unit": bar.unit,
                "passed": bar.passed,
            }
            for bar, first, bare in zip(validation.bars, validation.first_values, validation.first_columns, strict=True)
        ],
        "changed_values": _changed_values(),
        "sets": [{"name": score.name, **_set_json(score)} for score in (*validation.scores, *validation.held_out)],
        "runs": [_run_json(point) for point in validation.points],
    }


def report_figures(validation: ValidationReport) -> dict[str, Any]:
    """Targets and sets by their names, shares as fractions: what `docs/reports/validate.json` holds."""
    return {
        "runs": len(validation.points),
        "reached": sum(bar.passed for bar in validation.bars),
        "bars": {
            bar.name: {
                "value": _fraction(bar, bar.value),
                "limit": _fraction(bar, bar.limit),
                "at_least": bar.at_least,
                "unit": bar.unit,
                "reached": bar.passed,
                "first_values": _fraction(bar, first.value),
                "first_columns": _fraction(bar, bare.value),
            }
            for bar, first, bare in zip(validation.bars, validation.first_values, validation.first_columns, strict=True)
        },
        "small_groups": {
            "groups": sum(len(score.small_groups) for score in validation.scores),
            "regret": max(group.regret for score in validation.scores for group in score.small_groups),
        },
        "changed_values": sum(sum(columns.values()) for columns in _changed_values().values()),
        "held_out": sum(score.rows for score in validation.held_out),
        "sets": {score.name: _set_json(score) for score in (*validation.scores, *validation.held_out)},
    }


def _fraction(bar: Target, value: float) -> float:
    return value * (0.01 if bar.unit == "%" else 1.0)


def write_validation(validation: ValidationReport, path: Path) -> Path:
    """Write the page with the scatter plot of predicted and measured times."""
    style = files("danlu.report").joinpath("page.css").read_text(encoding="utf-8")
    body = [
        f'<header><h1>Predicted against measured</h1><p class="soft">{len(validation.points):,} published runs. '
        "Constants were fitted on the sets whose names begin with <code>fit-</code>, only.</p></header>",
        _scatter([point for point in validation.points if point.run.seconds]),
        f"<h2>Targets</h2>{_bar_rows(validation)}",
        f"<h2>Sets</h2>{_set_rows(validation)}",
        f"<h2>Furthest off</h2>{_worst_rows(validation.points)}",
    ]
    path.write_text(
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>Predicted against measured · Danlu</title><style>{style}{_STYLE}</style></head>"
        f"<body><main>{''.join(body)}</main></body></html>\n",
        encoding="utf-8",
    )
    return path


def _percent(value: float) -> str:
    return f"{100 * value:.1f} %"


def _dtypes(score: SetScore) -> str:
    """Precisions of the runs of a set."""
    return ", ".join(sorted({run.dtype for run in (*load_runs(), *load_held_out()) if run.set == score.name}))


def _sets(validation: ValidationReport) -> Table:
    table = Table("set", "precision", title="Predicted step time against published runs")
    for name in ("runs", "error", "bias", "memory", "error", "OOM", "false fit", "false OOM"):
        table.add_column(name, justify="right")
    for score in (*validation.scores, *validation.held_out):
        table.add_row(
            score.name,
            _dtypes(score),
            f"{score.rows:,}",
            _percent(score.error),
            f"{100 * score.bias:+.1f} %",
            f"{score.memory_rows:,}" if score.memory_rows else "",
            _percent(score.memory_error) if score.memory_rows else "",
            f"{score.out_of_memory}" if score.out_of_memory else "",
            f"{score.false_fits}" if score.out_of_memory else "",
            f"{score.false_rejections}" if score.false_rejections else "",
            style="dim" if score.is_fit_set else None,
        )
    return table


def _groups(scores: Sequence[SetScore]) -> Table:
    table = Table("runs that differ only in their layout", title="Order of layouts")
    for name in ("runs", "rank correlation", "regret"):
        table.add_column(name, justify="right")
    for score in scores:
        for group in score.groups:
            table.add_row(group.name, f"{group.rows}", f"{group.spearman:.2f}", _percent(group.regret))
    return table


def _small_groups(scores: Sequence[SetScore]) -> Table:
    """The regret of groups that are too small to be scored, worst first."""
    table = Table("groups of 3 to 7 runs, not scored", title="Regret of small groups")
    for name in ("runs", "regret"):
        table.add_column(name, justify="right")
    small = [group for score in scores for group in score.small_groups]
    for group in sorted(small, key=lambda group: -group.regret):
        if group.regret >= 0.0005:
            table.add_row(group.name, f"{group.rows}", _percent(group.regret))
    table.add_row(f"{sum(group.regret < 0.0005 for group in small)} others", "", _percent(0.0))
    return table


def _bars(validation: ValidationReport) -> Table:
    table = Table("target", title="Targets, and the same on development runs as they were first described")
    for name in ("measured", "limit", "", "first values", "first columns"):
        table.add_column(name, justify="right")
    for bar, first, bare in zip(validation.bars, validation.first_values, validation.first_columns, strict=True):
        color = "green" if bar.passed else "red"
        verdict = f"[{color}]{'reached' if bar.passed else 'missed'}[/]"
        table.add_row(bar.name, *_bar_words(bar), verdict, _bar_words(first)[0], _bar_words(bare)[0])
    return table


def _changed_values() -> dict[str, dict[str, int]]:
    """Values of held-out rows that differ from those first committed, by set and column."""
    sets = {run.id: run.set for run in load_runs()}
    counts: dict[str, dict[str, int]] = {}
    for row, values in original_values()[0].items():
        of_set = counts.setdefault(sets[row], {})
        for column in values:
            of_set[column] = of_set.get(column, 0) + 1
    return counts


def _changes() -> Table:
    """What was corrected after the split."""
    table = Table("set", "values that differ from those first committed", title="Corrected after the split")
    for name, columns in sorted(_changed_values().items()):
        table.add_row(name, ", ".join(f"{column} of {count}" for column, count in sorted(columns.items())))
    table.add_row("all", f"columns added since: {', '.join(original_values()[1])}")
    return table


def _bar_words(bar: Target) -> tuple[str, str]:
    unit = f" {bar.unit}" if bar.unit else ""
    digits = ".1f" if bar.unit else ".2f" if bar.at_least else ".0f"
    return f"{bar.value:{digits}}{unit}", f"{'≥' if bar.at_least else '≤'} {bar.limit:g}{unit}"


def _set_json(score: SetScore) -> dict[str, Any]:
    return {
        "runs": score.rows,
        "error": score.error,
        "bias": score.bias,
        "memory_runs": score.memory_rows,
        "memory_error": score.memory_error if score.memory_rows else None,
        "out_of_memory": score.out_of_memory,
        "false_fits": score.false_fits,
        "false_refusals": score.false_rejections,
        "groups": [
            {"name": group.name, "runs": group.rows, "spearman": group.spearman, "regret": group.regret}
            for group in score.groups
        ],
    }


def _run_json(point: RunComparison) -> dict[str, Any]:
    run, prediction = point.run, point.prediction
    return {
        "id": run.id,
        "set": run.set,
        "source": run.source,
        "dtype": run.dtype,
        "measured_seconds": run.seconds,
        "predicted_seconds": prediction.seconds,
        "parts": prediction.parts,
        "measured_bytes": run.memory,
        "predicted_bytes": point.predicted_memory,
        "fits": point.fits,
    }


def _scatter(points: Sequence[RunComparison]) -> str:
    """Predicted over measured seconds, both logarithmic; the line is where they are equal."""
    seconds = [value for point in points for value in (point.run.seconds or 0.0, point.prediction.seconds)]
    scale = Scale(min(seconds) / 1.3, max(seconds) * 1.3, _SIZE, log=True)
    rows = log_ticks(scale.low, scale.high)
    drawing = [_axis(scale(value), f"{value:g} s") for value in rows]
    drawing += [
        f'<line class="{name}" x1="{scale(scale.low):.1f}" y1="{_SIZE - scale(scale.low * by):.1f}" '
        f'x2="{scale(scale.high):.1f}" y2="{_SIZE - scale(scale.high * by):.1f}"/>'
        for name, by in (("tenth", 0.9), ("same", 1.0), ("tenth", 1.1))
    ]
    drawing += [_scatter_point(point, scale) for point in sorted(points, key=lambda point: not point.run.is_fit_set)]
    key = "".join(f'<span class="{tone}"><i></i>{escape(words)}</span>' for tone, words, _ in _FAMILIES)
    return (
        '<figure class="card chart scatter"><figcaption><h3>Seconds per step</h3>'
        "<small>predicted upwards, measured to the right; thin lines 10 % off</small></figcaption>"
        f'<svg viewBox="-56 -12 {_SIZE + 70} {_SIZE + 44}" role="img" aria-label="Predicted over measured seconds">'
        f'{"".join(drawing)}</svg><p class="key soft">{key}</p></figure>'
    )


def _axis(at: float, text: str) -> str:
    up = _SIZE - at
    return (
        f'<line class="axis" x1="0" x2="{_SIZE}" y1="{up:.1f}" y2="{up:.1f}"/>'
        f'<line class="axis" x1="{at:.1f}" x2="{at:.1f}" y1="0" y2="{_SIZE}"/>'
        f'<text x="-6" y="{up + 4:.1f}" text-anchor="end">{escape(text)}</text>'
        f'<text x="{at:.1f}" y="{_SIZE + 20}" text-anchor="middle">{escape(text)}</text>'
    )


def _scatter_point(point: RunComparison, scale: Scale) -> str:
    run = point.run
    tone = next((tone for tone, _, sets in _FAMILIES if run.set in sets), "fit" if run.is_fit_set else "rate")
    words = (
        f"{run.set} {run.id}: {run.model.name}, {run.cluster.name}, {run.dtype}, "
        f"{formatting.duration(run.seconds)} measured, {100 * point.error:+.0f} % predicted"
    )
    x, y = scale(run.seconds or scale.low), _SIZE - scale(point.prediction.seconds)
    return f'<circle class="{tone}" cx="{x:.1f}" cy="{y:.1f}" r="4"><title>{escape(words)}</title></circle>'


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    top = "".join(f'<th class="{"number" if index else ""}">{escape(word)}</th>' for index, word in enumerate(head))
    body = "".join(
        "<tr>"
        + "".join(
            f'<td class="{"number " if index else ""}{cell if cell in ("missed", "reached") else ""}">'
            f"{escape(cell)}</td>"
            for index, cell in enumerate(row)
        )
        + "</tr>"
        for row in rows
    )
    return f'<div class="card"><table><tr>{top}</tr>{body}</table></div>'


def _bar_rows(validation: ValidationReport) -> str:
    rows = [
        (bar.name, *_bar_words(bar), "reached" if bar.passed else "missed", _bar_words(first)[0], _bar_words(bare)[0])
        for bar, first, bare in zip(validation.bars, validation.first_values, validation.first_columns, strict=True)
    ]
    return _table(("target", "measured", "limit", "", "first values", "first columns"), rows)


def _set_rows(validation: ValidationReport) -> str:
    rows = [
        (
            score.name,
            _dtypes(score),
            f"{score.rows:,}",
            _percent(score.error),
            f"{100 * score.bias:+.1f} %",
        )
        for score in (*validation.scores, *validation.held_out)
    ]
    return _table(("set", "precision", "runs", "error", "bias"), rows)


def _worst_rows(points: Sequence[RunComparison]) -> str:
    held = [point for point in points if not point.run.is_fit_set and point.run.seconds]
    worst = sorted(held, key=lambda point: -abs(point.error))[:20]
    rows = [
        (
            f"{point.run.set} {point.run.id}: {point.run.model.name} on {point.run.cluster.name}, {point.run.dtype}",
            formatting.duration(point.run.seconds),
            f"{100 * point.error:+.0f} %",
            _largest(point),
        )
        for point in worst
    ]
    return _table(("run", "measured", "predicted", "of which"), rows)


def _largest(point: RunComparison) -> str:
    """The largest parts of a prediction."""
    parts = sorted(point.prediction.parts.items(), key=lambda part: -part[1])[:3]
    return ", ".join(f"{name} {100 * seconds / point.prediction.seconds:.0f} %" for name, seconds in parts)
