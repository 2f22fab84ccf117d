"""The commands a README shows, taken out of it so that they can be run."""

import re
import shlex
from dataclasses import dataclass

_FENCE = re.compile(
    r"^(?P<note><!--\s*not run:(?P<reason>.*?)-->\s*\n\s*)?"
    r"^```(?P<language>bash|console)[^\n]*\n(?P<body>.*?)^```\s*$",
    re.MULTILINE | re.DOTALL,
)
_PIP_INSTALL = re.compile(r"^(?:\S*python\S*\s+-m\s+)?pip3?\s+install\s+(?P<targets>.+)$")
_TAKES_VALUE = {"-c", "--constraint", "-r", "--requirement"}


@dataclass(frozen=True)
class Block:
    """One fenced block of commands."""

    line: int
    """Of its first command in the README."""
    commands: tuple[str, ...]
    """As they would be typed, a continued line in one piece."""
    not_run: str | None
    """Why it is only shown; None when it is to be run."""


def blocks(text: str) -> list[Block]:
    """Every `bash` and `console` block, in the order of the page."""
    return [
        Block(
            line=text.count("\n", 0, found.start("body")) + 1,
            commands=_commands(found["body"], prompted=found["language"] == "console"),
            not_run=found["reason"].strip() if found["note"] else None,
        )
        for found in _FENCE.finditer(text)
    ]


def told(text: str) -> list[str]:
    """What the page shows of its commands' output and what is the same on every machine, as patterns.

    All lines of a `console` block that is run; losses to a tenth and how many layouts were searched of the others.
    """
    lines = [
        re.escape(line)
        for found in _FENCE.finditer(text)
        if found["language"] == "console" and not found["note"]
        for line in found["body"].splitlines()
        if line.strip() and not line.startswith("$ ")
    ]
    losses = [rf"loss +{re.escape(loss)}" for loss in re.findall(r"^loss +(\d\.\d)", text, re.MULTILINE)]
    searched = re.findall(r"the best of [\d,]+ layouts, [\d,]+ priced in full", text)
    return [*lines, *losses, *map(re.escape, searched)]


def pip_targets(command: str) -> list[str]:
    """What a `pip install` line installs; empty when the line is another command."""
    found = _PIP_INSTALL.match(command)
    if not found:
        return []
    words = shlex.split(found["targets"], comments=True)
    valued = {index + 1 for index, word in enumerate(words) if word in _TAKES_VALUE}
    return [word for index, word in enumerate(words) if not word.startswith("-") and index not in valued]


def script(to_run: list[Block]) -> str:
    """One shell script of all blocks, so that a `cd` lasts as it does for the reader; each says where it starts."""
    lines = ["set -euo pipefail"]
    for block in to_run:
        lines.append(f"echo '>>> README.md:{block.line}'")
        lines += [command for command in block.commands if not pip_targets(command)]
    return "\n".join(lines) + "\n"


def _commands(body: str, *, prompted: bool) -> tuple[str, ...]:
    """The lines to type: all of a bash block, those behind `$ ` of a console block and what continues them."""
    commands: list[str] = []
    continued = False
    for line in body.splitlines():
        if continued:
            commands[-1] += "\n" + line.removeprefix("> ")
        elif not prompted and line.strip():
            commands.append(line)
        elif prompted and line.startswith("$ "):
            commands.append(line[2:])
        else:
            continue
        continued = line.endswith("\\")
    return tuple(commands)
