"""Carry figures from the reports in this folder to the pages that quote them.

python docs/reports/update.py           # rewrite README.md, docs/ and the rooms' READMEs
python docs/reports/update.py --check   # only say what differs; exit code 1 if anything does
"""

import argparse
import re
import sys
from pathlib import Path

from figures import REPORTS, ROOT, load, rewritten, wrong_ties
from tables import MADE, index

_MADE = re.compile(r"(?P<begin><!-- made: (?P<what>.*?) -->\n)(?P<body>.*?)(?P<end><!-- /made -->)", re.DOTALL)


def pages() -> list[Path]:
    """Every page that may quote a figure."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "src").rglob("README.md"))]


def made(what: str, folder: Path = REPORTS) -> str:
    """The text of a table that is made from a report."""
    if what == "index":
        return index({path.name: load(path.name, folder) for path in folder.glob("*.json")})
    if what not in MADE:
        raise ValueError(f"`{what}` is none of {', '.join(['index', *MADE])}")
    return MADE[what](load(what.partition(" ")[0], folder))


def updated(page: str, folder: Path = REPORTS) -> str:
    """A page with tables and figures as the reports have them."""
    page = _MADE.sub(lambda found: f"{found['begin']}{made(found['what'], folder)}\n{found['end']}", page)
    return rewritten(page, folder)


def main() -> int:
    """Update or compare every page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing")
    check = parser.parse_args().check
    differs = 0
    for path in pages():
        before = path.read_text("utf-8")
        try:
            after = updated(before)
        except ValueError as error:
            sys.stdout.write(f"{path.relative_to(ROOT)}: {error}\n")
            return 1
        if after != before:
            differs += 1
            sys.stdout.write(f"{path.relative_to(ROOT)}: {'differs from its reports' if check else 'updated'}\n")
            if not check:
                path.write_text(after, "utf-8")
        for line in wrong_ties(after):
            differs += 1
            sys.stdout.write(f"{path.relative_to(ROOT)}:{line}\n")
    return 1 if check and differs else 0


if __name__ == "__main__":
    sys.exit(main())
