"""Whether to apply a step: all ranks decide alike, from global metrics. And the stop signal."""

import json
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import isfinite
from typing import Any, Literal

from danlu.framework.spike_detector import Spike, SpikeDetector
from danlu.spec.spikes import SpikeConfig

MAX_SKIPPED_STEPS = 10
"""Consecutive steps that may be skipped before a run ends."""
MAX_REWINDS = 3
"""Consecutive rewinds before a run ends, unless `spikes.max_rewinds` says otherwise."""
_SCALAR = "spikes"


class DivergedError(RuntimeError):
    """Too many steps in a row could not be applied."""


@dataclass(frozen=True)
class Verdict:
    """Whether a step is applied, and why not."""

    action: Literal["apply", "skip", "rewind"]
    reason: Literal["", "not finite", "spike"] = ""
    """Why it is not applied; of a step that is, that it was a spike nevertheless."""
    spike: Spike | None = None
    """What was beyond the run's own statistics, as far as there are any."""

    @property
    def applied(self) -> bool:
        """Whether the optimizer takes the step."""
        return self.action == "apply"


@dataclass(frozen=True)
class RewindCount:
    """Rewinds since the run last got further than ever before."""

    count: int = 0
    furthest: int = 0
    """The furthest step that was not applied."""


class StepGuard:
    """Judges every step by its loss and norm: not finite, a spike by the run's own statistics, or usual.

    A step that is not finite is never applied. What happens to a spike is the policy's. Ends a run that cannot go on.
    """

    def __init__(self, config: SpikeConfig | None = None, patience: int = MAX_SKIPPED_STEPS) -> None:
        """Without a `config` only what is not finite is found."""
        self.config = config or SpikeConfig(policy="off")
        self.patience = patience
        self.unusual_in_a_row = 0
        self.rewinds = RewindCount()
        self._detector = SpikeDetector(self.config) if self.config.policy != "off" else None

    def judge(self, loss: float, norm: float, step: int, overflow: bool = False) -> Verdict:
        """The verdict on step `step`; what is usual becomes part of the statistics.

        Where it may be an `overflow` of fp16, a step that is not finite is skipped and says nothing about the run.
        """
        finite = isfinite(loss) and isfinite(norm)
        if overflow and not finite:
            return Verdict("skip", "not finite")
        spike = self._detector.find(loss, norm) if self._detector is not None else None
        if finite and spike is None:
            self.unusual_in_a_row = 0
            if step > self.rewinds.furthest:
                self.rewinds = RewindCount()
            if self._detector is not None:
                self._detector.accept(loss, norm)
            return Verdict("apply")
        self.unusual_in_a_row += 1
        if spike is not None and self.config.policy == "rewind":
            return Verdict("rewind", "spike" if finite else "not finite", spike)
        if not finite:
            return Verdict("skip", "not finite", spike)
        if self.config.policy == "skip":
            return Verdict("skip", "spike", spike)
        if self.unusual_in_a_row >= self.patience:  # no spike any more but another level
            self.unusual_in_a_row = 0
            self._learn_anew()
        return Verdict("apply", "spike", spike)

    def raise_if_diverged(self, loss: float, norm: float, step: int) -> None:
        """Raise `DivergedError` if too many steps in a row, up to `step`, were skipped."""
        if self.unusual_in_a_row < self.patience:
            return
        if isfinite(loss) and isfinite(norm):
            raise DivergedError(
                f"{self.unusual_in_a_row} steps in a row up to step {step} were skipped as spikes, the last with loss "
                f"{loss} and gradient norm {norm}; if that is the data's new level raise `spikes.threshold` or set "
                '`spikes.policy` to "warn", else lower the learning rate, or resume from an earlier checkpoint'
            )
        raise DivergedError(
            f"loss {loss} and gradient norm {norm} must be finite, but were not for {self.unusual_in_a_row} steps "
            f"up to step {step} on all ranks; lower the learning rate, or resume from an earlier checkpoint"
        )

    def count_rewind(self, step: int) -> RewindCount:
        """The count with one more rewind, from `step`; raises `DivergedError` if that is one too many."""
        most = self.config.max_rewinds or MAX_REWINDS
        if self.rewinds.count >= most:
            raise DivergedError(
                f"step {step} is a spike after {most} rewinds in a row, none of which got past step "
                f"{self.rewinds.furthest}; lower the learning rate, rewind further (`spikes.rewind`), or allow more "
                "(`spikes.max_rewinds`)"
            )
        return RewindCount(self.rewinds.count + 1, max(step, self.rewinds.furthest))

    def scalars(self) -> dict[str, str]:
        """What it knows, for a checkpoint; nothing if it looks for no spikes."""
        if self._detector is None:
            return {}
        known = {
            "unusual_in_a_row": self.unusual_in_a_row,
            "rewinds": self.rewinds.count,
            "furthest": self.rewinds.furthest,
            **self._detector.dump(),
        }
        return {_SCALAR: json.dumps(known)}  # every float to its last bit

    def restore(self, scalars: Mapping[str, Any]) -> None:
        """Know what a checkpoint's scalars say; of one without them, nothing: the statistics begin anew."""
        if self._detector is None:
            return
        known = json.loads(scalars.get(_SCALAR, "{}"))
        self.unusual_in_a_row = known.get("unusual_in_a_row", 0)
        self.rewinds = RewindCount(known.get("rewinds", 0), known.get("furthest", 0))
        self._detector.restore(known)

    def _learn_anew(self) -> None:
        if self._detector is not None:
            self._detector.restore({})


@contextmanager
def stop_on_signal() -> Iterator[Callable[[], bool]]:
    """Turn the first SIGINT or SIGTERM into a request to stop after the current step; a second one ends at once."""
    requests: list[int] = []

    def request_stop(number: int, _frame: Any) -> None:
        requests.append(number)
        for each, handler in before.items():
            signal.signal(each, handler)

    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for number in before:
        signal.signal(number, request_stop)
    try:
        yield lambda: bool(requests)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
