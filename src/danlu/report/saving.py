"""What there is to say of saves and resumes: in a line, in a table, on the page."""

from html import escape
from math import prod

from danlu.report import wording
from danlu.report.story import Story
from danlu.spec import Rehearsed, Resumed, Saved
from danlu.spec.plan import DENSE_AXES


def layout_words(axes: dict[str, int]) -> str:
    """Axes and the ranks they multiply to, as experts' ranks are those of others: `shard 2 · tp 2 · ep 2, 4 ranks`."""
    world = prod(degree for axis, degree in axes.items() if axis in DENSE_AXES)
    named = " · ".join(f"{axis} {degree}" for axis, degree in axes.items())
    return f"{named}, {world:,} ranks" if named else "1 rank"


def proof_rows(event: Resumed) -> list[tuple[str, str]]:
    """The proof of a resume, a row a fact."""
    return [
        ("was", layout_words(event.was)),
        ("now", layout_words(event.now)),
        ("tensors", f"{tensors_words(event)} equal by fingerprint, {wording.size(event.bytes)}"),
        ("samples", samples_words(event)),
    ]


def tensors_words(event: Resumed) -> str:
    """How many of the saved tensors were proven equal."""
    return f"{event.tensors:,} of {event.saved:,}" if event.saved is not None else f"{event.tensors:,}"


def samples_words(event: Resumed) -> str:
    """How many samples were consumed, and whether the next one is the next."""
    if event.repeated is None or event.skipped is None:
        return f"{event.samples:,} consumed; the run's events do not reach back to the first, so no more is known"
    return f"{event.samples:,} consumed, {event.repeated:,} repeated, {event.skipped:,} skipped"


def rehearsal_words(event: Rehearsed) -> str:
    """What a save will cost, in a line."""
    words = (
        f"a checkpoint has {wording.size(event.bytes)} and takes about {short(event.seconds)} in the background "
        f"({wording.size(event.bandwidth)}/s); training waits about {short(event.stall)} for it"
    )
    if event.memory:
        words += f"; {wording.size(event.memory)} of host memory are kept for it"
    if event.free is not None:
        words += f"; {wording.size(event.free)} are free in the store"
    if event.interval is not None:
        words += f"; at this machine's failure rate save every {wording.duration(event.interval)}"
    return words


def short(seconds: float) -> str:
    """A duration that may be very short."""
    if seconds < 0.0095:
        return f"{seconds * 1e3:.1f} ms"
    return f"{seconds * 1e3:.0f} ms" if seconds < 0.95 else wording.duration(seconds)


def saved_words(saved: Saved) -> str:
    """The newest save, as short as the live line wants it."""
    stall = f", waited {short(saved.stall)}" if saved.stall is not None else ""
    return f"saved {saved.step:,} in {short(saved.seconds)}{stall}"


def saves_card(story: Story) -> str:
    """The page's table of checkpoints."""
    if not story.saves:
        return ""
    rows = "".join(
        f'<tr><td class="number">{saved.step:,}</td><td class="number">{wording.duration(saved.seconds)}</td>'
        f'<td class="number">{wording.MISSING if saved.stall is None else short(saved.stall)}</td>'
        f'<td class="wide"><code>{escape(saved.path)}</code></td></tr>'
        for _, saved in sorted(story.saves.items())
    )
    expected = f'<p class="soft">{escape(_sentence(story.rehearsal))}</p>' if story.rehearsal else ""
    return (
        f'<details class="card"><summary>Checkpoints<small>{len(story.saves):,}</small></summary>{expected}'
        '<table><tr><th class="number">step</th><th class="number">took</th><th class="number">training waited</th>'
        f"<th>where</th></tr>{rows}</table></details>"
    )


def resumes_card(story: Story) -> str:
    """The page's table of resumes: from which layout to which, and the proof."""
    if not story.resumes:
        return ""
    rows = "".join(
        f'<tr><td class="number">{event.step:,}</td><td>{escape(layout_words(event.was))}</td>'
        f"<td>{escape(layout_words(event.now))}</td><td>{tensors_words(event)}</td>"
        f'<td class="wide">{escape(samples_words(event))}</td></tr>'
        for event in story.resumes
    )
    return (
        f'<details class="card"><summary>Resumes<small>{len(story.resumes):,}</small></summary>'
        '<table><tr><th class="number">step</th><th>was</th><th>now</th><th>tensors equal</th><th>samples</th></tr>'
        f"{rows}</table></details>"
    )


def _sentence(event: Rehearsed) -> str:
    words = rehearsal_words(event)
    return f"Before the first step: {words}."
