"""Figures on a page, and the reports that they come from.

A figure is tied to its report by a comment in the same paragraph, list item or table row, which names the figure as
it is written and where it stands in the report:

    On 63 layouts the loss is off by 1.9 · 10⁻⁷. <!-- parity.json: 63 layouts = layouts; 1.9 · 10⁻⁷ = worst.loss -->

Words around a number tell equal ones apart (`18 of = reached; of 19 = layouts`). A place is a path of keys and numbers
of list items, `*` for all of them, with `max`, `min`, `mean`, `sum` or `count` (of what is true) before it where there
are several. A paragraph whose figures nobody measured says so: `<!-- not measured: the reason -->`; one whose figures
are bars that a test holds names it: `<!-- asserted: tests/unit/test_x.py -->`.
"""

import json
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REPORTS = Path(__file__).resolve().parent
ROOT = REPORTS.parents[1]

_SUPERSCRIPTS = str.maketrans("⁻⁰¹²³⁴⁵⁶⁷⁸⁹", "-0123456789")
_POWER = r"10[⁻⁰¹²³⁴⁵⁶⁷⁸⁹]+"
_NUMBER = re.compile(
    rf"(?P<sign>[-+−]?)(?P<digits>\d+(?:,\d{{3}})*(?:\.\d+)?)(?:e(?P<e>[-+]\d+)| · (?P<power>{_POWER}))?"
    r"(?:\s?(?P<unit>%|ms\b|µs\b|s\b|min\b|KiB\b|MiB\b|GiB\b|TiB\b|kB\b|MB\b|GB\b|TB\b))?"
)
_BARE_POWER = re.compile(rf"(?<!· )(?<!\d){_POWER}")
_UNITS = {"%": 1e-2, "ms": 1e-3, "µs": 1e-6, "min": 60.0}
_UNITS |= {unit: 1024.0**power for power, unit in enumerate(("KiB", "MiB", "GiB", "TiB"), start=1)}
_UNITS |= {unit: 1000.0**power for power, unit in enumerate(("kB", "MB", "GB", "TB"), start=1)}

_FIGURE = re.compile(
    rf"(?<![≤≥<>]\s)(?<![\w.,≤≥<>/-])(?:\d[\d,.]* · {_POWER}|{_POWER}|\d[\d,.]*e-\d+"
    r"|\d[\d,.]*\s?(?:%|(?:ms|µs|s|seconds|minutes|min|[GT]i?B|MB|kB)\b|\d[\d,]*\.\d+\s?[KM]iB\b)"
    r"|\d[\d,]*\.\d+\s?×|\d[\d,]*\s?×(?!\s?[\w`])"
    r"|\d[\d,.]*\s(?:of\s(?:the\s)?\d[\d,]*|layouts|runs|states|kills|changes|inputs|pairs)\b)"
)
# A whole number of KiB or MiB is a constant of a format or a limit, no measurement.
_TIES = re.compile(r"<!-- (?P<report>[\w-]+\.json): (?P<ties>.*?) -->", re.DOTALL)
_EXEMPT = re.compile(r"<!-- (?:not measured: \S.*?|asserted: (?P<test>\S+)) -->", re.DOTALL)
_COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
_MADE = re.compile(r"<!-- made: .*? -->.*?<!-- /made -->", re.DOTALL)
_FENCE = re.compile(r"^ *```.*?^ *```[^\n]*$|(?<=\n\n)(?: {4}[^\n]*\n)+", re.DOTALL | re.MULTILINE)
_REDUCTIONS: dict[str, Callable[[list[Any]], float]] = {
    "max": max,
    "min": min,
    "sum": sum,
    "mean": lambda values: sum(values) / len(values),
    "count": lambda values: sum(map(bool, values)),
}


@dataclass(frozen=True)
class Tie:
    """A figure as it is written, and where its value stands."""

    report: str
    phrase: str
    place: str


@dataclass(frozen=True)
class Block:
    """A paragraph, a list item or a table row."""

    line: int
    text: str

    @property
    def prose(self) -> str:
        """What a reader sees, on one line."""
        return prose(self.text)

    @property
    def ties(self) -> list[Tie]:
        """The figures of this block that come from reports."""
        found = []
        for comment in _TIES.finditer(self.text):
            for each in comment["ties"].split(";"):
                phrase, equals, place = (" ".join(part.split()) for part in each.rpartition(" = "))
                if not equals or not place or len(_NUMBER.findall(phrase)) != 1:
                    raise ValueError(f"`{each.strip()}` is no tie: write `one figure = place in {comment['report']}`")
                found.append(Tie(comment["report"], phrase, place))
        return found


def blocks(page: str) -> Iterator[Block]:
    """Every block of a page; code, which shows what commands said, and tables made from a report are left out."""
    for pattern in (_FENCE, _MADE):
        page = pattern.sub(lambda found: "\n" * found[0].count("\n"), page)
    start, lines = 1, list[str]()
    for number, line in enumerate([*page.split("\n"), ""], start=1):
        begins = bool(re.match(r"\s*(?:[-*] |\d+\. |\||#)", line)) and not _inside_comment(lines)
        if lines and (begins or not line.strip()):
            yield Block(start, "\n".join(lines))
            lines = []
        if line.strip():
            start = start if lines else number
            lines.append(line)


def prose(text: str) -> str:
    """A text without its comments, on one line."""
    return " ".join(_COMMENT.sub(" ", text).split())


def _inside_comment(lines: list[str]) -> bool:
    text = "\n".join(lines)
    return text.count("<!--") > text.count("-->")


def load(name: str, folder: Path = REPORTS) -> dict[str, Any]:
    """A report; what it lacks is an error."""
    path = folder / name
    if not path.is_file():
        raise ValueError(f"{path} is not there: run its command with --report, or name another report")
    return dict(json.loads(path.read_text("utf-8")))


def value_at(figures: Any, place: str) -> float:
    """The number at a place of a report's figures."""
    first, _, rest = place.partition(" ")
    reduction = _REDUCTIONS.get(first)
    found = _all_at(figures, (rest if reduction else place).split("."), place)
    if reduction:
        return float(reduction(found))
    if len(found) != 1:
        raise ValueError(f"`{place}` are {len(found)} values: put {', '.join(_REDUCTIONS)} before it")
    return float(found[0])


def _all_at(value: Any, keys: list[str], place: str) -> list[Any]:
    if not keys:
        return [value]
    if isinstance(value, dict):  # a key may have dots of its own
        whole = next((n for n in range(1, len(keys) + 1) if ".".join(keys[:n]) in value), 1)
        keys = [".".join(keys[:whole]), *keys[whole:]]
    key, *rest = keys
    if key == "*":
        items = list(value.values()) if isinstance(value, dict) else list(value)
        return [found for item in items for found in _all_at(item, rest, place)]
    try:
        inner = value[key] if isinstance(value, dict) else value[int(key)]
    except (KeyError, ValueError, IndexError, TypeError):
        known = list(value) if isinstance(value, dict) else f"{type(value).__name__} {value!r}"
        raise ValueError(f"`{place}`: there is no `{key}` in {known}") from None
    return _all_at(inner, rest, place)


def number(phrase: str) -> float:
    """The first number of a phrase, in units of one: `7.9 %` is 0.079, `10⁻⁵` is 0.00001."""
    if bare := _BARE_POWER.search(phrase):
        return 10.0 ** int(bare[0][2:].translate(_SUPERSCRIPTS))
    found = _NUMBER.search(phrase)
    if not found:
        raise ValueError(f"`{phrase}` has no number")
    value = float(found["digits"].replace(",", "")) * 10.0 ** _exponent(found) * _UNITS.get(found["unit"] or "", 1.0)
    return -value if found["sign"] in ("-", "−") else value


def _exponent(found: re.Match[str]) -> int:
    if found["e"]:
        return int(found["e"])
    return int(found["power"][2:].translate(_SUPERSCRIPTS)) if found["power"] else 0


def written(phrase: str, value: float) -> str:
    """The phrase with its number replaced by the value, to as many digits as are written."""
    if bare := _BARE_POWER.search(phrase):
        now = f"10{_superscript(round(math.log10(value)))}" if value > 0 else "0"
        return (
            phrase[: bare.start()] + (now if math.isclose(number(now), value) else f"{value:g}") + phrase[bare.end() :]
        )
    found = _NUMBER.search(phrase)
    assert found
    value /= _UNITS.get(found["unit"] or "", 1.0)
    decimals = len(found["digits"].partition(".")[2])
    if _exponent(found):
        new_exponent = int(f"{value:.{decimals}e}".partition("e")[2])
        mantissa = f"{value / 10.0**new_exponent:.{decimals}f}"
        tail = f"e{new_exponent:+03d}" if found["e"] else f" · 10{_superscript(new_exponent)}"
        return phrase[: found.start()] + mantissa + tail + phrase[_end_of_number(found) :]
    comma = "," if "," in found["digits"] or abs(value) >= 10_000 else ""
    digits = f"{abs(value):{comma}.{decimals}f}"
    sign = found["sign"]
    if sign or value < 0:
        sign = ("−" if sign == "−" else "-") if value < 0 else "+" if sign else ""
    return phrase[: found.start()] + sign + digits + phrase[found.end("digits") :]


def _end_of_number(found: re.Match[str]) -> int:
    return found.end("power") if found["power"] else found.end("e")


def _superscript(number: int) -> str:
    return str(number).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))


def command_of(report: dict[str, Any]) -> str:
    """The command that made a report, without where it was written to."""
    return re.sub(r"\s--reports? \S+", "", report["command"])


def wrong_ties(page: str, folder: Path = REPORTS) -> list[str]:
    """Figures that are not those of their report, as `line: what`."""
    found = []
    flat = " ".join(page.split())
    for block in blocks(page):
        try:
            for tie in block.ties:
                report = load(tie.report, folder)
                now = written(tie.phrase, value_at(report["figures"], tie.place))
                if not _stands_in(tie.phrase, block.prose):
                    found.append(f"{block.line}: `{tie.phrase}` does not stand in this paragraph")
                elif now != tie.phrase:
                    found.append(f"{block.line}: `{tie.phrase}` is `{now}` in {tie.report} ({tie.place})")
                elif command_of(report) not in flat:
                    found.append(f"{block.line}: the page does not name `{command_of(report)}`, as {tie.report} does")
        except ValueError as error:
            found.append(f"{block.line}: {error}")
    return found


def _stands_in(phrase: str, prose: str) -> bool:
    """Whether the phrase stands there by itself, not as a part of a longer number."""
    return re.search(rf"(?<![\d.,]){re.escape(phrase)}(?![\d]|[.,]\d)", prose) is not None


def untied(page: str) -> list[str]:
    """Figures that nothing ties to a report, as `line: figure`."""
    found = []
    for block in blocks(page):
        exempt = _EXEMPT.search(block.text)
        if exempt and exempt["test"] and not (ROOT / exempt["test"]).is_file():
            found.append(f"{block.line}: there is no {exempt['test']}")
        if block.text.lstrip().startswith("#") or exempt:
            continue
        prose = re.sub(r"`[^`]*`|\]\([^)]*\)", lambda code: "`" * len(code[0]), block.prose)
        tied = [place.span() for tie in block.ties for place in re.finditer(re.escape(tie.phrase), prose)]
        for figure in _FIGURE.finditer(prose):
            if not any(start < figure.end() and figure.start() < end for start, end in tied):
                found.append(f"{block.line}: {figure[0]}")
    return found


def rewritten(page: str, folder: Path = REPORTS) -> str:
    """The page with every tied figure as its report has it now."""
    for block in blocks(page):
        text = block.text
        for tie in block.ties:
            now = written(tie.phrase, value_at(load(tie.report, folder)["figures"], tie.place))
            if now == tie.phrase:
                continue
            phrase = r"\s+".join(map(re.escape, tie.phrase.split()))
            text = re.sub(rf"(?<![\d.,]){phrase}(?![\d]|[.,]\d)", now.replace("\\", r"\\"), text)
        page = page.replace(block.text, text, 1)
    return page
