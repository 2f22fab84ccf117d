"""Runs the commands of data.md in an empty folder and puts their real output below them.

python docs/how-to/make_data.py            # writes the page anew
python docs/how-to/make_data.py --check    # says what differs, and fails if something does; seconds do not count
"""

import difflib
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

PAGE = Path(__file__).with_name("data.md")
WIDTH = 110
_BLOCK = re.compile(r"(?P<note><!-- not run:[^\n]*-->\n\n?)?```console\n(?P<body>.*?)```", re.DOTALL)
_RECIPE = re.compile(r"```toml\n(?P<text>.*?)```", re.DOTALL)
_SECONDS = re.compile(r"\bin \d+\.\d s\b")
_HEAD = """\
name = "mixed"
steps = 100
seed = 5

[model]
base = "tiny-llama"
vocabulary = 264

[batch]
sequences = 4
length = 64

"""


def prepare(folder: Path, page: str) -> None:
    """Three small files of text, and the recipe that the page speaks of."""
    texts = {
        "code": [f"def times_{number}(x):\n    return x * {number}\n" for number in range(300)],
        "prose": [f"The furnace was opened for the {number}th time, and the elixir was not yet done. " * 3
                  for number in range(300)],
        "late": [f"def plus_{number}(x):\n    return x + {number}\n" for number in range(100)],
    }  # fmt: skip
    for name, documents in texts.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    recipe = _RECIPE.search(page)
    assert recipe is not None
    (folder / "mixed.toml").write_text(_HEAD + recipe["text"])


def remade(page: str) -> str:
    """The page with the output of every command that can be run here."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place).resolve()
        prepare(folder, page)

        def block(found: re.Match[str]) -> str:
            if found["note"]:
                return found[0]
            commands = [line.removeprefix("$ ") for line in found["body"].splitlines() if line.startswith("$ ")]
            made = "".join(f"$ {command}\n{_output(command, folder)}" for command in commands)
            return f"```console\n{made}```"

        return _BLOCK.sub(block, page)


def _output(command: str, folder: Path) -> str:
    shell = f'danlu() {{ {shlex.quote(sys.executable)} -m danlu "$@"; }}; {command}'
    environment = os.environ | {"COLUMNS": str(WIDTH)}
    done = subprocess.run(
        ["bash", "-c", shell],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return "".join(f"{line.rstrip()}\n" for line in done.stdout.replace(f"{folder}/", "").splitlines())


def main() -> None:
    """Write the page, or hold it against what is printed now."""
    page = PAGE.read_text()
    new = remade(page)
    if "--check" not in sys.argv:
        PAGE.write_text(new)
        return
    old, now = (_SECONDS.sub("in … s", text).splitlines() for text in (page, new))
    sys.stdout.write("\n".join(difflib.unified_diff(old, now, "as it stands", "as it is", lineterm="")))
    sys.exit(old != now)


if __name__ == "__main__":
    main()
