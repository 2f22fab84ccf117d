"""Predict every published run and compare: error, order of layouts, pick, memory; fails if a target is missed.

    python benchmarks/validation/validate.py                    # tables; exit code 1 while a target is missed
    python benchmarks/validation/validate.py --page PAGE.html   # with a page: every run a dot, the worst ones by name
    python benchmarks/validation/validate.py --json             # every run with its prediction by part

The runs and their sources are in `published`; constants were fitted only on the sets that begin with `fit-`. The
figures are the same on every machine, so a test compares the report (`--report`) with what the code predicts now.
"""

import argparse
import json
import sys
import webbrowser
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from reports import add_report_option, write_report

from danlu.report.terminal import Console
from validation.report import report_figures, validation_json, validation_tables, write_validation
from validation.scores import validate


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--page", type=Path, metavar="PAGE.html", help="write a page with every run as a dot")
    parser.add_argument("--open", action="store_true", help="open the page in the browser")
    parser.add_argument("--json", action="store_true", help="print JSON, with every run")
    add_report_option(parser)
    options = parser.parse_args(arguments)
    page = options.page or (Path("validation.html") if options.open else None)
    with Console(stderr=True).status("predicting the published runs"):
        found = validate()
    write_report(options.report, "validate", report_figures(found))
    if page is not None:
        try:
            write_validation(found, page)
        except OSError as error:
            print(f"The page cannot be written: {error}", file=sys.stderr)
            return 2
    if options.json:
        print(json.dumps(validation_json(found), indent=2))
    else:
        # a file or a pipe has no width of its own: give it every column
        console = Console() if sys.stdout.isatty() else Console(width=140)
        console.print(validation_tables(found))
    if options.open and not webbrowser.open(page.resolve().as_uri()):
        print(f"The page was not opened, because the browser did not start: {page}", file=sys.stderr)
    return 0 if found.passed else 1


if __name__ == "__main__":
    sys.exit(main())
