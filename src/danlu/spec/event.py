"""Events of a run: one per line in `events.jsonl`; what only one rank can report in `events/rank-N.jsonl`."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from math import nan
from typing import Annotated, Literal

from pydantic import Field, TypeAdapter, ValidationError

from danlu.spec.description import SpecModel
from danlu.spec.text import one_line

PeakSource = Literal["measured at start", "measured on this machine", "measured by danlu probe", "data sheet"]
"""Source of the peak FLOP/s for MFU; measured on this machine by this run or by earlier ones."""
Timestamp = Annotated[float, Field(ge=0, le=253_402_300_799, allow_inf_nan=False)]
"""Seconds since the epoch, up to the year 9999."""
FiniteFloat = Annotated[float, Field(ge=-1e30, le=1e30, allow_inf_nan=False)]
BoundedInt = Annotated[int, Field(ge=-(10**24), le=10**24)]
"""Of steps, tokens, bytes or ranks."""


class StartEvent(SpecModel):
    """All processes have built the model and are about to start training."""

    kind: Literal["started"] = "started"
    time: Timestamp
    """Seconds since the epoch."""
    world: BoundedInt
    chip: str
    parameters: BoundedInt
    step: BoundedInt
    """Step the run starts from; above 0 when resumed."""
    steps: BoundedInt
    tokens_per_step: BoundedInt
    flops_per_token: FiniteFloat
    """Model FLOPs, forward and backward, without recompute."""
    peak: FiniteFloat
    """Peak FLOP/s of all ranks that MFU is computed against."""
    peak_source: PeakSource
    peak_spread: float | None = None
    """Spread of the measurements of the peak, as a share of the best; None if it was not measured."""
    dtype: str = ""
    """Precision of compute, which the peak is for."""
    host: str = ""
    """Name of the machine of rank 0."""
    layout: dict[str, BoundedInt] = Field(default_factory=dict)
    """Degrees of the mesh axes; those of 1 are omitted."""
    baseline_loss: FiniteFloat | None = None
    """Cross-entropy of a unigram model of the corpus: a model that has learned anything is below it."""


class StepEvent(SpecModel):
    """One optimizer step; all figures are global."""

    kind: Literal["step"] = "step"
    time: Timestamp
    step: BoundedInt
    """Steps done, this one included."""
    loss: float
    """Mean cross-entropy over all tokens of the global batch that are counted."""
    norm: float
    """Norm of the global gradient before clipping."""
    learning_rate: float
    tokens: BoundedInt
    """Tokens of this step."""
    seconds: FiniteFloat
    memory: BoundedInt
    """Largest memory of any rank so far, in bytes."""
    committed: bool = True
    """False when the update was skipped; `reason` says why."""
    reason: Literal["", "not finite", "spike"] = ""
    """What was unusual about loss or norm; a spike is described by an event of its own."""
    loss_scale: FiniteFloat | None = None
    """Scale of the loss in this step, where anything is fp16; a step that overflowed was not committed."""
    imbalance: float | None = None
    """Load of the busiest expert over the mean, averaged over the expert layers."""
    counted: BoundedInt | None = None
    """Tokens of this step whose prediction counts in the loss; None if all of them do."""
    mtp_losses: tuple[float, ...] | None = None
    """Mean cross-entropy of every module of multi-token prediction, which `loss` does not contain; None without it."""
    all_to_all_seconds: FiniteFloat | None = None
    """Seconds in which all-to-alls were under way, the mean of all ranks; None without any, and on accelerators."""
    traffic: dict[str, BoundedInt] | None = None
    """Bytes that all ranks together sent over each level of the network since the step before, innermost first.

    None if the run has no cluster file, which says what the levels are, or one rank.
    """


class EvaluationEvent(SpecModel):
    """Loss on held-out data, the same at every layout."""

    kind: Literal["evaluated"] = "evaluated"
    time: Timestamp
    step: BoundedInt
    """Steps done."""
    losses: dict[str, float]
    """Mean cross-entropy by data set, in nats per token."""
    tokens: dict[str, BoundedInt]
    """Tokens of each data set that were predicted."""
    seconds: FiniteFloat

    @property
    def loss(self) -> float:
        """Mean over the tokens of all data sets."""
        total = sum(self.tokens.values())
        return sum(self.losses[name] * count for name, count in self.tokens.items()) / total if total else nan


class SpikeEvent(SpecModel):
    """Loss or gradient norm of a step was beyond the run's own statistics: what was done, and what it cost."""

    kind: Literal["spike"] = "spike"
    time: Timestamp
    step: BoundedInt
    """The step, as in its own event."""
    metric: Literal["loss", "norm"]
    """The metric that was furthest beyond its limit."""
    value: float
    expected: FiniteFloat
    """What the steps before it let expect."""
    limit: FiniteFloat
    """The largest value that is no spike."""
    sigmas: float
    """Robust standard deviations between the expected value and this one."""
    action: Literal["warned", "skipped", "rewound"]
    """The update was applied, or skipped, or the run went back to an earlier checkpoint."""
    rewound_to: BoundedInt | None = None
    """Step of that checkpoint. Events of later steps before this one are of a branch that was left."""
    first_sample: BoundedInt = 0
    """Index of the first sample of the step's batch."""
    lost_steps: BoundedInt = 0
    """Steps whose updates are lost, this one included."""
    lost_samples: BoundedInt = 0
    """Samples that were read for them, and are not read again."""
    lost_seconds: FiniteFloat = 0.0
    """Time that was spent on them, and on reading the checkpoint."""
    note: str = ""
    """Why less was done than the policy says; empty if it was done."""


class SaveEvent(SpecModel):
    """A checkpoint is complete."""

    kind: Literal["saved"] = "saved"
    time: Timestamp
    step: BoundedInt
    path: str
    seconds: FiniteFloat
    """From the save request to the last byte in the store; training continued for most of it."""
    stall: FiniteFloat | None = None
    """Seconds that training stalled."""


class ResumeEvent(SpecModel):
    """A run resumes from a checkpoint, whose tensors were verified bit for bit."""

    kind: Literal["resumed"] = "resumed"
    time: Timestamp
    step: BoundedInt
    was: dict[str, BoundedInt]
    """Degrees of the mesh that saved it; those of 1 are omitted."""
    now: dict[str, BoundedInt]
    """The same of the mesh that resumes."""
    tensors: BoundedInt
    """Tensors whose fingerprints, over all ranks, match the saved ones."""
    saved: BoundedInt | None = None
    """Tensors in the checkpoint."""
    bytes: BoundedInt
    samples: BoundedInt
    """Samples consumed: the index of the next one."""
    repeated: BoundedInt | None = None
    """Samples read again although their updates were kept; None if the run's events do not reach back that far."""
    skipped: BoundedInt | None = None
    """Samples that are skipped; None as above."""


class RecoveryEvent(SpecModel):
    """Ranks were lost, and the run goes on: from which state, and what that cost."""

    kind: Literal["recovered"] = "recovered"
    time: Timestamp
    step: BoundedInt
    """Steps done of the state that the run goes on from. Events of later steps before this one are repeated."""
    generation: BoundedInt
    """How many worlds the run had before in this launch."""
    ranks: tuple[BoundedInt, ...]
    """Ranks that are new processes."""
    cause: str
    """What happened, in one line."""
    source: Literal["memory", "checkpoint", "start"]
    """Where the state comes from: memory of the host, the newest checkpoint, or the first step."""
    seconds: FiniteFloat
    """From when the fault was seen to when the ranks are ready again."""


class PreflightEvent(SpecModel):
    """A trial save before the first step: the store accepts it, and this is what it will cost."""

    kind: Literal["rehearsed"] = "rehearsed"
    time: Timestamp
    bytes: BoundedInt
    """Of one save, over all ranks."""
    seconds: FiniteFloat
    """From the save request to the last byte, at the measured speed."""
    stall: FiniteFloat
    """Seconds that training will stall, at the measured copy speed."""
    bandwidth: FiniteFloat
    """Bytes per second that all hosts wrote together, or may write if `checkpoint.bandwidth` allows less."""
    memory: BoundedInt = 0
    """Bytes of host memory for staging buffers, over all hosts."""
    free: BoundedInt | None = None
    """Free bytes in the store; None if unknown."""
    interval: FiniteFloat | None = None
    """Optimal seconds between saves by Young's formula; None if no failure rate is known."""


class WarningEvent(SpecModel):
    """Something differs from what was requested, with its cost."""

    kind: Literal["warning"] = "warning"
    time: Timestamp
    rank: BoundedInt
    message: str


class RankFailureEvent(SpecModel):
    """A rank failed; written by that rank itself. A rank that was killed by a signal writes none."""

    kind: Literal["rank_failed"] = "rank_failed"
    time: Timestamp
    rank: BoundedInt
    step: BoundedInt | None
    """Steps done; None before the model was built."""
    error: str
    """Type of the error."""
    message: str
    """In one line."""
    explained: bool
    """Whether it is one of Danlu's own errors, whose message is enough; else the traceback is in the rank's log."""
    host: str
    pid: BoundedInt


class EndEvent(SpecModel):
    """The run has ended."""

    kind: Literal["ended"] = "ended"
    time: Timestamp
    step: BoundedInt
    outcome: Literal["finished", "failed", "stopped"]
    message: str = ""


Event = Annotated[
    StartEvent
    | StepEvent
    | EvaluationEvent
    | SpikeEvent
    | SaveEvent
    | ResumeEvent
    | RecoveryEvent
    | PreflightEvent
    | WarningEvent
    | RankFailureEvent
    | EndEvent,
    Field(discriminator="kind"),
]
_MAX_LISTED_KINDS, _MAX_KIND_LENGTH = 4, 40
_EVENT: TypeAdapter[Event] = TypeAdapter(Event)
_EVENTS: TypeAdapter[list[Event]] = TypeAdapter(list[Event])


def parse_event(line: str | bytes) -> Event:
    """Read one line of `events.jsonl`."""
    return _EVENT.validate_json(line)


def parse_known_events(lines: Iterable[str | bytes], unknown: Counter[str] | None = None) -> Iterator[Event]:
    """Read lines and skip kinds that only a newer Danlu knows, counted in `unknown`; any other bad line raises."""
    for line in lines:
        try:
            yield parse_event(line)
        except ValidationError as error:
            if (kind := unknown_kind(error)) is None:
                raise
            if unknown is not None:
                unknown[kind] += 1


def describe_unknown_events(unknown: Counter[str]) -> str:
    """How many events were skipped, by kind; empty if none was."""
    counts = [f'{count:,} of kind "{kind}"' for kind, count in unknown.most_common(_MAX_LISTED_KINDS)]
    more = f" and {len(unknown) - len(counts):,} other kinds" if len(unknown) > len(counts) else ""
    return f"skipped events that a newer Danlu wrote: {', '.join(counts)}{more}" if unknown else ""


def unknown_kind(error: ValidationError) -> str | None:
    """The kind of an event that this Danlu does not know; None if the line is malformed."""
    detail = error.errors(include_url=False)[0]
    if detail["type"] != "union_tag_invalid" or not isinstance(detail["input"].get("kind"), str):
        return None
    return one_line(detail["input"]["kind"][:_MAX_KIND_LENGTH])


def parse_events(lines: Sequence[bytes]) -> list[Event]:
    """Read many lines at once, quicker than one after the other; raises `ValidationError` if any is no event."""
    return _EVENTS.validate_json(b"[" + b",".join(lines) + b"]")
