"""What `danlu sample` prints while text is drawn, and what it keeps in the run's folder."""

from pathlib import Path

from rich.text import Text

from danlu.cli.ckpt_ref import fail
from danlu.cli.show import update_page
from danlu.report.terminal import Console
from danlu.spec import RunFolder
from danlu.spec.recipe import Access
from danlu.spec.samples import SampleSet
from danlu.storage.access import restore_umask, set_umask
from danlu.storage.sample_files import write_samples


class SamplePrinter:
    """Prints the samples of one prompt one after the other, although they are drawn together.

    The first that has not ended is printed as it is drawn; the others wait for their turn.
    """

    def __init__(self, console: Console, prompt: str, number: int, prompts: int, count: int) -> None:
        self._console, self._prompt, self._count = console, prompt, count
        self._heading = f"prompt {number + 1} of {prompts}" if prompts > 1 else ""
        self._waiting = [""] * count
        self._ended = [False] * count
        self._current = 0
        self._begin()

    def on_text(self, sample: int, piece: str) -> None:
        """Print a piece, or keep it until its sample's turn."""
        if sample == self._current:
            self._print(piece)
        else:
            self._waiting[sample] += piece

    def on_end(self, sample: int) -> None:
        """Continue with the next sample if this one was being printed."""
        self._ended[sample] = True
        while self._current < self._count and self._ended[self._current]:
            self._print("\n")
            self._current += 1
            if self._current < self._count:
                self._begin()
                self._print(self._waiting[self._current])

    def _begin(self) -> None:
        numbered = f"sample {self._current + 1} of {self._count}" if self._count > 1 else ""
        if heading := ", ".join(filter(None, (self._heading, numbered))):
            self._print(f"── {heading}\n", "dim")
        self._print(self._prompt, "bold")

    def _print(self, text: str, style: str = "") -> None:
        self._console.print(Text(text, style), end="", soft_wrap=True)


def save_samples(run: RunFolder, access: Access, samples: SampleSet) -> Path:
    """Write samples into the run's folder, for the run's readers, and update its page; returns their file."""
    path = run.samples / samples.file_name
    try:
        with restore_umask():
            set_umask(access)
            write_samples(run, samples)
            _, trouble = update_page(run)
    except OSError as error:
        fail(f"{path} cannot be written: {error.strerror}")
    if trouble:
        fail(f"saved {path}, but not on the page. {trouble}")
    return path
