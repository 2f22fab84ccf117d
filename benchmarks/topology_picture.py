"""Every layout that `topology.py` measured, as a picture: how many times as long as the fastest of its network it took.

python benchmarks/topology_picture.py docs/reports/topology.json docs/pictures/topology.svg
"""

import json
import sys
from collections.abc import Sequence
from math import log
from pathlib import Path
from typing import Any

CHOSEN, SYMMETRIC, OTHER = "#2a7f3f", "#c8641b", "#b8bec6"
WIDTH, LEFT, RIGHT, ROW, TOP = 760, 170, 20, 26, 44
SYMMETRIC_NAME = "experts over everything"
TICKS = (1.0, 1.25, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0)


def draw(cases: Sequence[dict[str, Any]]) -> str:
    """A row for every network, a dot for every layout; the fastest is at 1."""
    slowest = max(layout["measured"] / fastest(case) for case in cases for layout in case["layouts"])
    height = TOP + ROW * len(cases) + 36

    def x(ratio: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * log(ratio) / log(max(slowest, TICKS[1]))

    parts = [f'<rect width="{WIDTH}" height="{height}" fill="white"/>', *legend()]
    for tick in (tick for tick in TICKS if tick <= slowest):
        parts.append(f'<path d="M{x(tick):.1f},{TOP - 8}V{height - 34}" stroke="#e6e8eb"/>')
        parts.append(f'<text x="{x(tick):.1f}" y="{height - 20}" text-anchor="middle">{tick:g} ×</text>')
    parts.append(f'<text x="{(LEFT + WIDTH) / 2}" y="{height - 4}" text-anchor="middle">step, of the fastest</text>')
    for row, case in enumerate(cases):
        y = TOP + ROW * row + 6
        parts.append(f'<text x="{LEFT - 16}" y="{y + 4}" text-anchor="end">{label(case)}</text>')
        for layout in sorted(case["layouts"], key=lambda each: rank_of(each, case)):
            color, radius = looks(layout, case)
            at, title = x(layout["measured"] / fastest(case)), f"<title>{layout['name']}</title>"
            parts.append(f'<circle cx="{at:.1f}" cy="{y}" r="{radius}" fill="{color}">{title}</circle>')
    told = f"step time of every layout on {len(cases)} networks, relative to the fastest"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" '
        f'font-size="12" role="img" aria-label="{told}">{"".join(parts)}</svg>\n'
    )


def fastest(case: dict[str, Any]) -> float:
    """Seconds of the fastest layout's step."""
    return min(float(layout["measured"]) for layout in case["layouts"])


def label(case: dict[str, Any]) -> str:
    """What network it is."""
    network = case["network"]
    return f"{network['host_rate'] / 1e6:.0f} MB/s, trunk 1:{network['trimmed']:.1f}"


def rank_of(layout: dict[str, Any], case: dict[str, Any]) -> int:
    """Which dots are drawn over which."""
    return 2 if layout["name"] == case["chosen"] else int(layout["name"] == SYMMETRIC_NAME)


def looks(layout: dict[str, Any], case: dict[str, Any]) -> tuple[str, int]:
    """Color and radius of a layout's dot."""
    return ((OTHER, 4), (SYMMETRIC, 6), (CHOSEN, 6))[rank_of(layout, case)]


def legend() -> list[str]:
    """What the colors mean."""
    parts, at = [], LEFT
    for color, text, space in (
        (CHOSEN, "chosen by the planner", 170),
        (SYMMETRIC, "symmetric", 100),
        (OTHER, "another layout", 0),
    ):
        parts += [f'<circle cx="{at}" cy="16" r="6" fill="{color}"/>', f'<text x="{at + 12}" y="20">{text}</text>']
        at += space
    return parts


def main() -> None:
    if len(sys.argv) != 3:
        sys.exit(__doc__.split("\n\n")[1].strip())
    report, picture = Path(sys.argv[1]), Path(sys.argv[2])
    picture.write_text(draw(json.loads(report.read_text())["figures"]["cases"]), "utf-8")


if __name__ == "__main__":
    main()
