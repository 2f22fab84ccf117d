"""What to do about a step whose loss or gradient norm is far beyond those before it."""

from typing import Literal

from pydantic import Field

from danlu.spec.description import MAX_COUNT, SpecModel

TREND_STEPS = 16
"""Accepted steps whose median is the level that a step is compared with."""


class SpikeConfig(SpecModel):
    """Loss or gradient norm beyond the run's own statistics: tell, skip the batch, or rewind and skip."""

    policy: Literal["off", "warn", "skip", "rewind"] = "warn"
    """Nothing; an event; also no update with this batch; also back to an earlier checkpoint, past its later batches."""
    window: int = Field(default=128, ge=32, le=4096)
    """Accepted steps that the statistics are made of."""
    threshold: float = Field(default=12.0, ge=3, le=1000)
    """Robust standard deviations above what the last steps let expect that make a spike."""
    rewind: int | None = Field(default=None, ge=1, le=MAX_COUNT)
    """Steps to go back, at least; the newest checkpoint that is so old is used. `checkpoint.every` if omitted."""
    max_rewinds: int | None = Field(default=None, ge=1, le=1000)
    """Rewinds that may follow each other without progress before the run stops; 3 if omitted."""

    @property
    def steps_to_learn(self) -> int:
        """Accepted steps before the first that is judged: a level, and a quarter of the window around it."""
        return TREND_STEPS + self.window // 4
