"""Write the results of `danlu validate` as a report.

    python benchmarks/published_runs.py --report docs/reports/validate.json

The figures are the same on every machine, so a test compares the report with what the code predicts now.
"""

import argparse
from typing import Any

from reports import add_report_option, write_report

from danlu.cost.validation import Target, ValidationReport, validate
from danlu.report.validation import validation_json


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_report_option(parser)
    arguments = parser.parse_args()
    write_report(arguments.report, "validate", figures(validate()), "danlu validate")


def figures(found: ValidationReport) -> dict[str, Any]:
    """Bars and sets by their names, shares as fractions."""
    told = validation_json(found)
    return {
        "runs": len(found.points),
        "reached": sum(bar.passed for bar in found.bars),
        "bars": {
            bar.name: _bar(bar) | {"first_values": _value(first), "first_columns": _value(bare)}
            for bar, first, bare in zip(found.bars, found.first_values, found.first_columns, strict=True)
        },
        "small_groups": {
            "groups": sum(len(score.small_groups) for score in found.scores),
            "regret": max(group.regret for score in found.scores for group in score.small_groups),
        },
        "changed_values": sum(sum(columns.values()) for columns in told["changed_values"].values()),
        "sets": {score.pop("name"): score for score in told["sets"]},
    }


def _bar(bar: Target) -> dict[str, Any]:
    share = 0.01 if bar.unit == "%" else 1.0
    return {"value": _value(bar), "limit": bar.limit * share, "at_least": bar.at_least, "reached": bar.passed}


def _value(bar: Target) -> float:
    return bar.value * (0.01 if bar.unit == "%" else 1.0)


if __name__ == "__main__":
    main()
