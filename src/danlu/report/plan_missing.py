"""What a plan would gain if Danlu had what other software has, for the terminal, the page and JSON."""

from typing import Any

from rich.table import Table
from rich.text import Text

from danlu.planner.missing import MissingFeature, missing_features
from danlu.planner.pricing import PricedPlan
from danlu.report.page_template import prose

TITLE = "What Danlu does not do for this layout, and what it would gain"
_COLUMNS = ("feature", "per step", "fullest chip", "why it is not offered")


def missing_table(priced: PricedPlan) -> Table:
    """The features for the terminal, the largest gain first."""
    table = Table(title=TITLE, title_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in _COLUMNS:
        table.add_column(name, no_wrap=name == "feature", justify="left")
    for feature in missing_features(priced):
        table.add_row(*(Text(cell) for cell in _cells(feature)))
    return table


def missing_section(priced: PricedPlan) -> str:
    """The same for the page."""
    head = "".join(f"<th>{name}</th>" for name in _COLUMNS)
    rows = "".join(
        f"<tr>{''.join(f'<td>{prose(cell)}</td>' for cell in _cells(feature))}</tr>"
        for feature in missing_features(priced)
    )
    return f'<h2>{TITLE}</h2><div class="card scroll"><table><tr>{head}</tr>{rows}</table></div>'


def missing_json(priced: PricedPlan) -> list[dict[str, Any]]:
    """The same for machines."""
    return [vars(feature) for feature in missing_features(priced)]


def _cells(feature: MissingFeature) -> tuple[str, str, str, str]:
    if feature.seconds is None or feature.share is None:
        return feature.name, "not priced", "", f"{feature.reason}; {feature.not_priced}"
    gain = f"{-feature.seconds:+.3f} s ({-100 * feature.share:+.1f} %)"
    saved = f"{-feature.bytes / 1e9:+.1f} GB" if feature.bytes and abs(feature.bytes) >= 5e7 else ""
    return feature.name, gain, saved, feature.reason
