"""What is asked of the planner: a run, a machine, and what the answer may not touch."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from danlu.spec.cluster import Cluster
from danlu.spec.load import Sourced
from danlu.spec.model import Model
from danlu.spec.plan import DENSE_AXES
from danlu.spec.problem import nearest
from danlu.spec.recipe import Recipe
from danlu.spec.toml import Document

KNOBS = (*DENSE_AXES, "ep", "microbatches", "microbatch", "schedule", "virtual", "recompute", "reshard")
"""What a search turns: degrees; pieces of a rank's batch, or sequences of a piece; schedule and stages a rank; what is
computed again; whether gathered parameters are freed after the forward pass."""
SCHEDULES = ("1f1b", "interleaved", "zero-bubble", "zbv")
"""Schedules searched. `gpipe` is left out: it takes as long as `1f1b` and holds at least as many microbatches."""
RECOMPUTES = ("none", "selective", "full")
VIRTUAL = (2, 3, 4, 6, 8)
"""Stages a rank that are searched for looped schedules."""
RESERVE = 0.03
"""Share of a chip's memory left to what no formula sees, unless the question says otherwise."""


class QuestionError(ValueError):
    """A question that cannot be asked; the message says what to change."""


@dataclass(frozen=True)
class Limits:
    """Knobs that are held, and values that are ruled out."""

    fixed: Mapping[str, frozenset[str]] = field(default_factory=dict)
    refused: Mapping[str, frozenset[str]] = field(default_factory=dict)

    def allow(self, knob: str, value: object) -> bool:
        """Whether a knob may have this value."""
        text = str(value).lower()
        return text in self.fixed.get(knob, (text,)) and text not in self.refused.get(knob, ())


def limits(fix: str = "", without: str = "") -> Limits:
    """Read `tp=8,pp=4` and `pp,zbv`; several values of one knob are joined by `|`."""
    fixed: dict[str, frozenset[str]] = {}
    for word in _words(fix):
        knob, _, values = word.partition("=")
        knob = knob.strip()
        if knob not in KNOBS or not values:
            raise QuestionError(
                f'--fix: "{word}" must be a knob and its value, such as tp=8: {nearest(knob, [*KNOBS])}'
            )
        fixed[knob] = frozenset(value.strip().lower() for value in values.split("|"))
    refused: dict[str, frozenset[str]] = {}
    for word in _words(without):
        if word in (*DENSE_AXES, "ep"):
            fixed[word] = frozenset({"1"})
        elif word in SCHEDULES:
            refused["schedule"] = refused.get("schedule", frozenset()) | {word}
        elif word in RECOMPUTES:
            refused["recompute"] = refused.get("recompute", frozenset()) | {word}
        else:
            known = [*DENSE_AXES, "ep", *SCHEDULES, *RECOMPUTES]
            raise QuestionError(
                f'--without: "{word}" is neither an axis, a schedule nor a recompute: {nearest(word, known)}'
            )
    return Limits(fixed, refused)


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


@dataclass(frozen=True, kw_only=True)
class Question:
    """Which layout for this run on so many chips of this machine?"""

    recipe: Recipe
    cluster: Cluster
    chips: int
    limits: Limits = Limits()
    reserve: float = RESERVE
    """Share of a chip's memory that stays free."""
    imbalance: float = 1.0
    """Tokens of the fullest expert rank over the mean."""

    def __post_init__(self) -> None:
        if not isinstance(self.recipe.model, Model):
            raise QuestionError(
                f'the model "{self.recipe.model.name}" is a module of its own, whose layers no formula knows: describe '
                "it by its shape under [model], or choose its layout by hand"
            )
        if not 1 <= self.chips <= self.cluster.chips:
            raise QuestionError(
                f'{self.chips:,} chips were asked for, but "{self.cluster.name}" has {self.cluster.chips:,}: '
                f"--chips {self.cluster.chips} or fewer"
            )

    @property
    def model(self) -> Model:
        """The shape of what is trained."""
        return self.recipe.decoder

    @property
    def dtype(self) -> str:
        """Precision of compute."""
        return self.recipe.precision.compute

    @property
    def memory(self) -> float:
        """Bytes of a chip that a plan may fill."""
        return self.cluster.chip.memory * (1 - self.reserve)

    @cached_property
    def source(self) -> Sourced[Recipe]:
        """The recipe as the rules read it."""
        return Sourced(self.recipe, Document(Path("recipe"), {}, {}))
