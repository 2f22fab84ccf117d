"""After a spike: go back if the policy says so, and write what was done and what it cost.

A rewind restores a checkpoint, with its step and statistics, but not its place in the data: the run goes on with the
sample after the spike's batch. It is then the same as a run whose data never had the samples in between.
"""

import time
from collections import deque

from danlu.framework.stages import CheckpointStage, EventSink
from danlu.framework.state import TrainState
from danlu.framework.step_guard import Verdict
from danlu.spec.event import SpikeEvent, StepEvent
from danlu.spec.recipe import Recipe

_TIMED_STEPS = 10_000
"""Newest steps whose time is known; of earlier ones the mean of these is assumed."""


class SpikeRecovery:
    """Carries out verdicts on spikes. All ranks have the same verdict, and call this together."""

    def __init__(self, recipe: Recipe, checkpoints: CheckpointStage, events: EventSink) -> None:
        self._steps_back = recipe.spikes.rewind or recipe.checkpoint.every
        self._length = recipe.batch.length
        self._checkpoints, self._events = checkpoints, events
        self._seconds: deque[float] = deque(maxlen=_TIMED_STEPS)

    def rewound(self, state: TrainState, step: StepEvent, verdict: Verdict) -> bool:
        """Do what the verdict on the last step asks for; whether the state is now that of an earlier checkpoint."""
        self._seconds.append(step.seconds)
        if verdict.spike is None:
            return False
        next_sample, samples, rewound_to, note = state.cursor, step.tokens // self._length, None, ""
        lost_steps, lost_samples, seconds = (0, 0, 0.0) if verdict.applied else (1, samples, step.seconds)
        if verdict.action == "rewind":
            count, began = state.guard.count_rewind(step.step), time.perf_counter()
            rewound_to = self._checkpoints.rewind(state, step.step - 1 - self._steps_back)
            if rewound_to is None:
                note = "there is no checkpoint to rewind to yet, so the batch is skipped"
            else:
                lost_steps, lost_samples = step.step - rewound_to, next_sample - state.cursor
                seconds = self._time_of_last(lost_steps) + time.perf_counter() - began
                state.cursor, state.guard.rewinds = next_sample, count
        spike = verdict.spike
        self._events.write(
            SpikeEvent(
                time=time.time(), step=step.step, metric=spike.metric, value=spike.value, expected=spike.expected,
                limit=spike.limit, sigmas=spike.sigmas,
                action="warned" if verdict.applied else "skipped" if rewound_to is None else "rewound",
                rewound_to=rewound_to, first_sample=next_sample - samples, lost_steps=lost_steps,
                lost_samples=lost_samples, lost_seconds=seconds, note=note,
            )
        )  # fmt: skip
        return rewound_to is not None

    def _time_of_last(self, steps: int) -> float:
        """Seconds that the last steps took."""
        known = min(steps, len(self._seconds))
        return sum(list(self._seconds)[-known:]) * steps / known
