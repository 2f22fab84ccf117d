"""Runs the commands of how-to pages in an empty folder and puts their real output below them.

Used by the `make_*.py` beside it. Of a page, in its order:

- a ```console block: every line that begins with `$ ` is run, and its output replaces what stands below it
- a ```sh block: run, its output is not shown
- a ```toml or ```python block whose first line is a comment with a file's name: written to that file

A block after `<!-- not run: the reason -->` is left as it is.
"""

import difflib
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

WIDTH = 110
_BLOCK = re.compile(
    r"(?P<note><!-- not run:[^\n]*-->\n\n?)?```(?P<language>console|sh|toml|python)\n(?P<body>.*?)```", re.DOTALL
)
_NAMED = re.compile(r"# (?P<name>[\w.-]+\.(?:toml|py))\n")
_VARYING = re.compile(r"(?<=\bin )\d+\.\d(?= s\b)|(?<=transformers )\d+\.\d+\.\d+|\b\d\.\d\de[+-]\d\d\b")
"""Seconds, versions, and differences by rounding."""


def remade(page: str, folder: Path) -> str:
    """The page with the output of every command that can be run here, in `folder`."""

    def block(found: re.Match[str]) -> str:
        language, body = found["language"], found["body"]
        if found["note"]:
            return found[0]
        if language in ("toml", "python"):
            if named := _NAMED.match(body):
                (folder / named["name"]).write_text(body)
            return found[0]
        if language == "sh":
            _output(f"set -e\n{body}", folder, must_succeed=True)
            return found[0]
        commands = [line.removeprefix("$ ") for line in body.splitlines() if line.startswith("$ ")]
        made = "".join(f"$ {command}\n{_output(command, folder)}" for command in commands)
        return f"```console\n{made}```"

    return _BLOCK.sub(block, page)


def _output(command: str, folder: Path, *, must_succeed: bool = False) -> str:
    python = shlex.quote(sys.executable)
    shell = f'danlu() {{ {python} -m danlu "$@"; }}; python() {{ {python} "$@"; }}; {command}'
    done = subprocess.run(
        ["bash", "-c", shell],
        cwd=folder,
        env=os.environ | {"COLUMNS": str(WIDTH)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if must_succeed and done.returncode:
        sys.exit(f"{command}\nended with {done.returncode}:\n{done.stdout}")
    return "".join(f"{line.rstrip()}\n" for line in done.stdout.replace(f"{folder}/", "").splitlines())


def main(pages: Sequence[Path], prepare: Callable[[Path, str], None]) -> None:
    """Write the pages, or with `--check` hold them against what is printed now; all of them share one folder."""
    differ = False
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place).resolve()
        for path in pages:
            page = path.read_text()
            prepare(folder, page)
            new = remade(page, folder)
            if "--check" not in sys.argv:
                path.write_text(new)
                continue
            old, now = (_VARYING.sub("…", text).splitlines() for text in (page, new))
            sys.stdout.write(
                "\n".join(difflib.unified_diff(old, now, f"{path.name} as it stands", "as it is", lineterm=""))
            )
            differ |= old != now
    sys.exit(differ)
