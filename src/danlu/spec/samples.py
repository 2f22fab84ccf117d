"""Text that a run's checkpoint generated, as it is kept in the run's folder and printed with `--json`."""

import hashlib
from typing import Literal

from pydantic import Field

from danlu.spec.description import MAX_COUNT, SpecModel, TupleOf
from danlu.spec.event import Timestamp

MAX_SAMPLES_BYTES = 8 << 20
"""Largest file of samples."""

SampleEnd = Literal["end of text", "tokens", "context", "not finite"]
"""Why a sample ended: the model said so, it has as many tokens as asked for, the context is full, or the model's
numbers are not finite."""


class Sample(SpecModel):
    """One continuation of a prompt."""

    prompt: str
    """Empty where the model began a text of its own."""
    text: str
    """What the model continued the prompt with."""
    tokens: int = Field(ge=0, le=MAX_COUNT)
    """Tokens of `text`."""
    ended: SampleEnd


class SampleSet(SpecModel):
    """Samples of one checkpoint and how they were drawn: enough to draw them again."""

    format: Literal[1] = 1
    run: str
    step: int = Field(ge=0, le=MAX_COUNT)
    time: Timestamp
    """When they were drawn, in seconds since the epoch."""
    temperature: float = Field(ge=0, le=1e9)
    top_k: int = Field(ge=0, le=MAX_COUNT)
    """0 for all tokens."""
    top_p: float = Field(gt=0, le=1)
    seed: int = Field(ge=0, lt=2**63)
    dtype: str
    samples: TupleOf[Sample]

    @property
    def file_name(self) -> str:
        """Its name in the run's folder: the same request of the same step replaces its file."""
        asked = self.model_copy(update={"time": 0.0, "samples": ()}).model_dump_json()
        prompts = "\0".join(sample.prompt for sample in self.samples)
        return f"step-{self.step:08d}-{hashlib.sha256(f'{asked}{prompts}'.encode()).hexdigest()[:8]}.json"
