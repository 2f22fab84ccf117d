"""Make the pictures of the documentation anew, or only those that are named.

    python docs/pictures/make.py [quickstart] [dryrun]

`quickstart` runs the quickstart in a terminal and photographs it and its page (`train.svg`, `report.png`); it needs
tmux, and a machine with nothing else to do for two minutes. `dryrun` photographs the page of a dry run
(`dryrun-page.png`), which takes some minutes more. Both need chromium.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.text import Text

from danlu.spec import EndEvent, RunFolder, StepEvent
from danlu.storage.data.build import build_dataset
from danlu.storage.data.tokenizer import BytesTokenizer

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
COMMAND = "danlu train recipes/quickstart.toml"
COLUMNS, ROWS = 86, 8
SHUTTER = 120
"""Step at which the terminal is photographed: the bar is half full and the loss has moved."""
PAGE = (1100, 1045)
"""Pixels of a run's page that are shown: down to the second row of curves."""
DRYRUN_PAGE = (1100, 1480)
"""Pixels of a dry run's page that are shown: down to the memory of the first rank."""
DRYRUN_PLAN = """\
microbatches = 8
recompute = "full"

[degrees]
pp = 4
replicate = 4
shard = 32
tp = 8
"""
DRYRUN_RANKS = "0,1024,2048,3072"
"""One at every place of the pipeline."""
PATIENCE = 900.0
"""Seconds: an idle machine takes one minute, a busy one many."""


def main() -> None:
    """Make the pictures that are asked for."""
    makers = {"quickstart": quickstart, "dryrun": dryrun}
    names = sys.argv[1:] or list(makers)
    for name in names:
        if name not in makers:
            sys.exit(f"pictures must be among {', '.join(makers)}, but one is {name}")
    for program in ["chromium"] + ["tmux"] * ("quickstart" in names):
        if shutil.which(program) is None:
            sys.exit(f"{program} must be installed, but is not: apt-get install {program}")
    for name in names:
        with tempfile.TemporaryDirectory(prefix="danlu-") as folder:
            shutil.copytree(ROOT / "recipes", Path(folder) / "recipes")
            makers[name](Path(folder))


def quickstart(folder: Path) -> None:
    """The first run in its terminal, and its page."""
    run = RunFolder(folder / "runs" / "quickstart")
    build_dataset(["python-stdlib"], folder / "shards" / "python-stdlib", BytesTokenizer())
    with Terminal(folder) as terminal:
        terminal.type(COMMAND)
        wait_for(lambda: any(isinstance(e, StepEvent) and e.step >= SHUTTER for e in run.read_events()))
        (HERE / "train.svg").write_text(terminal.picture(), encoding="utf-8")
        wait_for(lambda: any(isinstance(e, EndEvent) for e in run.read_events()))
        wait_for(run.report.exists)
    photograph(run.report, HERE / "report.png", PAGE)


def dryrun(folder: Path) -> None:
    """The page of a large model on 4,096 ranks."""
    (folder / "plan.toml").write_text(DRYRUN_PLAN, encoding="utf-8")
    command = [sys.executable, "-m", "danlu", "dryrun", "recipes/llama3-70b.toml", "--plan", "plan.toml"]
    command += ["--cluster", "h100-pod", "--ranks", DRYRUN_RANKS, "--html", "dryrun.html"]
    subprocess.run(command, check=True, cwd=folder, stdout=subprocess.DEVNULL)
    photograph(folder / "dryrun.html", HERE / "dryrun-page.png", DRYRUN_PAGE)


class Terminal:
    """A terminal of a fixed size, with a server of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.socket = f"danlu-pictures-{os.getpid()}"

    def __enter__(self) -> "Terminal":
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        shell = f"env PATH={shlex.quote(path)} PS1='$ ' bash --norc --noprofile"
        size = ["-x", str(COLUMNS), "-y", str(ROWS)]
        self._tmux("-f", "/dev/null", "new-session", "-d", *size, "-c", str(self.folder), shell)
        wait_for(lambda: "$" in self._screen())
        return self

    def __exit__(self, *error: object) -> None:
        self._tmux("kill-server")

    def type(self, command: str) -> None:
        """Type a command and press Enter."""
        self._tmux("send-keys", command, "Enter")

    def picture(self) -> str:
        """What stands on the screen now, as SVG without anything from outside."""
        with open(os.devnull, "w") as nowhere:  # noqa: PTH123
            console = Console(record=True, width=COLUMNS, file=nowhere)
            console.print(Text.from_ansi(self._screen()), soft_wrap=True)
        svg = console.export_svg(title="danlu train")
        return re.sub(r"@font-face \{.*?\}\n?", "", svg, flags=re.DOTALL)  # fonts would be fetched from a server

    def _screen(self) -> str:
        return self._tmux("capture-pane", "-p", "-e").rstrip()

    def _tmux(self, *words: str) -> str:
        command = ["tmux", "-L", self.socket, *words]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def photograph(page: Path, picture: Path, size: tuple[int, int]) -> None:
    """Let a browser without a window draw a page."""
    quiet = ["--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync"]
    with tempfile.TemporaryDirectory() as profile:
        command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", *quiet]
        command += [f"--user-data-dir={profile}", "--hide-scrollbars", f"--window-size={size[0]},{size[1]}"]
        command += [f"--screenshot={picture}", page.as_uri()]
        subprocess.run(command, check=True, capture_output=True, timeout=120)


def wait_for(ready: Callable[[], bool]) -> None:
    """Look four times a second until it is so."""
    deadline = time.monotonic() + PATIENCE
    while not ready():
        if time.monotonic() > deadline:
            sys.exit(f"the run must be done within {PATIENCE:.0f} s, but is not")
        time.sleep(0.25)


if __name__ == "__main__":
    main()
