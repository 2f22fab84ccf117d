"""What happened: one event a line in a run's `events.jsonl`."""

from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

from danlu.spec.description import Description

PeakSource = Literal["measured at start", "measured by danlu probe", "data sheet"]
"""Where the FLOP/s come from that MFU is reckoned against."""


class Started(Description):
    """A run's processes have built the model and are about to take a step."""

    kind: Literal["started"] = "started"
    time: float
    """Seconds since the epoch."""
    world: int
    chip: str
    parameters: int
    step: int
    """Step the run starts from; above 0 when resumed."""
    steps: int
    tokens_per_step: int
    flops_per_token: float
    """Model FLOPs, forward and backward, without recompute."""
    peak: float
    """FLOP/s of all ranks that MFU is reckoned against."""
    peak_source: PeakSource
    baseline_loss: float | None = None
    """Cross-entropy a unigram model of the corpus reaches: a model that has learned anything is below it."""


class StepReport(Description):
    """One optimiser step; every figure is the global one."""

    kind: Literal["step"] = "step"
    time: float
    step: int
    """Steps done, this one included."""
    loss: float
    """Mean cross-entropy over all tokens of the global batch."""
    norm: float
    """Norm of the whole gradient before clipping."""
    learning_rate: float
    tokens: int
    """Tokens of this step."""
    seconds: float
    memory: int
    """Largest memory of any rank so far, in bytes."""
    committed: bool = True
    """False when loss or norm was not finite and the update was skipped."""
    imbalance: float | None = None
    """Load of the busiest expert over the mean, averaged over the expert layers."""


class Saved(Description):
    """A checkpoint is complete."""

    kind: Literal["saved"] = "saved"
    time: float
    step: int
    path: str
    seconds: float
    """From the wish to save to the last byte in the store; the training went on for most of it."""
    stall: float | None = None
    """Seconds the training waited for it."""


class Resumed(Description):
    """A run goes on from a checkpoint, whose tensors were proven to be here bit for bit."""

    kind: Literal["resumed"] = "resumed"
    time: float
    step: int
    was: dict[str, int]
    """Ranks on the axes of the mesh that saved it; axes of one are left out."""
    now: dict[str, int]
    """The same of the mesh that goes on."""
    tensors: int
    """Tensors whose fingerprints, over all ranks, are those that were saved."""
    saved: int | None = None
    """Tensors in the checkpoint."""
    bytes: int
    samples: int
    """Samples consumed: the number of the next one."""
    repeated: int | None = None
    """Samples that are read again though what they taught was kept; None where the run's events do not reach back."""
    skipped: int | None = None
    """Samples that are never read; None as above."""


class Rehearsed(Description):
    """Before the first step, a save was tried out: the store takes it, and this is what it will cost."""

    kind: Literal["rehearsed"] = "rehearsed"
    time: float
    bytes: int
    """Of one save, over all ranks."""
    seconds: float
    """From the wish to save to the last byte, at the speed of a probe."""
    stall: float
    """Seconds the training will wait, at the speed its tensors were copied with."""
    bandwidth: float
    """Bytes a second that all hosts wrote together, or may write where `checkpoint.bandwidth` allows less."""
    memory: int = 0
    """Bytes of host memory that saves keep, over all hosts."""
    free: int | None = None
    """Bytes left in the store; None where nobody can tell."""
    interval: float | None = None
    """Seconds between saves that lose least to failures, by Young's formula; None where no failure rate is known."""


class Warned(Description):
    """Something departs from what was asked, with its cost."""

    kind: Literal["warning"] = "warning"
    time: float
    rank: int
    message: str


class Ended(Description):
    """The run is over."""

    kind: Literal["ended"] = "ended"
    time: float
    step: int
    outcome: Literal["finished", "failed", "stopped"]
    message: str = ""


Event = Annotated[Started | StepReport | Saved | Resumed | Rehearsed | Warned | Ended, Field(discriminator="kind")]
_EVENT: TypeAdapter[Event] = TypeAdapter(Event)


def parse_event(line: str) -> Event:
    """Read one line of `events.jsonl`."""
    return _EVENT.validate_json(line)
