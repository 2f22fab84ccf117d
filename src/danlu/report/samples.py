"""The samples of a run's checkpoints on its page."""

from html import escape

from pydantic import ValidationError

from danlu.report import formatting
from danlu.spec import RunFolder, SpecError
from danlu.spec.files import read_text
from danlu.spec.problem import expected_from
from danlu.spec.samples import MAX_SAMPLES_BYTES, Sample, SampleSet

MAX_SHOWN = 24
"""Samples on a page; those of the newest steps."""
MAX_CHARACTERS = 2_000
"""Characters of a prompt or a text on a page."""
_OPEN_STEPS = 1


def read_samples(run: RunFolder) -> tuple[list[SampleSet], list[str]]:
    """The samples in a run's folder, those of the newest step first; and what could not be read."""
    found, problems = list[SampleSet](), list[str]()
    for path in sorted(run.samples.glob("step-*.json")) if run.samples.is_dir() else []:
        try:
            found.append(SampleSet.model_validate_json(read_text(path, MAX_SAMPLES_BYTES)))
        except SpecError as error:
            problems.append(str(error))
        except (ValidationError, OSError) as error:
            why = expected_from(error) if isinstance(error, ValidationError) else error.strerror
            problems.append(f"{run.samples.name}/{path.name} has no samples that can be read: {why}")
    return sorted(found, key=lambda samples: (-samples.step, samples.time)), problems


def samples_section(samples: list[SampleSet]) -> str:
    """The page's samples by step, the newest open and the others folded."""
    steps: dict[int, list[str]] = {}
    shown = 0
    for group in samples:
        for sample in group.samples[: MAX_SHOWN - shown]:
            steps.setdefault(group.step, []).append(_sample(group, sample))
            shown += 1
    if not steps:
        return ""
    cards = "".join(
        f'<details class="card"{" open" if number < _OPEN_STEPS else ""}><summary>Step {step:,}'
        f"<small>{len(texts):,}</small></summary>{''.join(texts)}</details>"
        for number, (step, texts) in enumerate(steps.items())
    )
    left = sum(len(group.samples) for group in samples) - shown
    more = f'<p class="soft">{left:,} more in the run\'s folder, under samples.</p>' if left else ""
    return f"<h2>Samples</h2>{cards}{more}"


def _sample(group: SampleSet, sample: Sample) -> str:
    drawn = "most likely tokens" if group.temperature == 0 else f"temperature {formatting.number(group.temperature)}"
    limits = [f"top-k {group.top_k}" if group.top_k else "", f"top-p {group.top_p:g}" if group.top_p < 1 else ""]
    facts = " · ".join(filter(None, [drawn, *limits, f"{sample.tokens:,} tokens", _ENDED[sample.ended]]))
    return (
        f'<figure class="sample"><pre><b>{_clip(sample.prompt)}</b>{_clip(sample.text)}</pre>'
        f"<figcaption>{escape(facts)}</figcaption></figure>"
    )


_ENDED = {
    "end of text": "ended by the model",
    "tokens": "",
    "context": "the context was full",
    "not finite": "the model's numbers were not finite",
}


def _clip(text: str) -> str:
    return escape(text if len(text) <= MAX_CHARACTERS else f"{text[:MAX_CHARACTERS]}…")
