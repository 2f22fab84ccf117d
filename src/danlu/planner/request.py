"""A request to the planner: a recipe, a cluster, a number of chips, and constraints on the search."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import get_args

from danlu.cost.software import TokenDispatch
from danlu.planner.fit_chance import default_reserve
from danlu.spec.cluster import Cluster, Dtype
from danlu.spec.divisors import closest_multiple
from danlu.spec.load import ParsedSpec
from danlu.spec.model import Model
from danlu.spec.plan import DENSE_AXES, ContextParallel, TokenDispatcher
from danlu.spec.problem import suggest_name
from danlu.spec.rank_placement import nodes_used
from danlu.spec.recipe import ComputeDtype, Recipe
from danlu.spec.toml import TomlDocument

KNOBS = (
    *DENSE_AXES,
    "ep",
    "context",
    "microbatches",
    "microbatch",
    "schedule",
    "virtual",
    "recompute",
    "reshard",
    "regather",
    "compile",
    "dispatcher",
    "chunks",
)
"""What a search varies: degrees; how `cp` attends (`context_parallel`); microbatches, or sequences per microbatch;
schedule and stages per rank; recompute; whether gathered parameters, and inputs that `tp` gathered, are freed after the
forward pass; `compile`, if asked; how tokens reach the experts of `ep` (`token_dispatcher`), and in how many parts
(`dispatch_chunks`)."""
SEARCHED_SCHEDULES = ("1f1b", "interleaved", "zero-bubble", "zbv")
"""Schedules searched. `gpipe` is skipped: it takes as long as `1f1b` and holds at least as many microbatches."""
CONTEXT_KINDS = get_args(ContextParallel)
"""How ranks of `cp` attend."""
RECOMPUTE_MODES = ("none", "selective", "full")
STAGES_PER_RANK = (2, 3, 4, 6, 8)
"""Stages per rank that are searched for looped schedules."""
TOKEN_DISPATCHERS = get_args(TokenDispatcher)
"""How tokens reach the experts of other ranks."""
DISPATCH_CHUNKS = (1, 2, 4)
"""Parts of a layer's tokens that are searched: of more, each is too short for its matmuls."""
DISPATCHES = (*(TokenDispatch(chunks=chunks) for chunks in DISPATCH_CHUNKS), TokenDispatch(deduplicated=True))
"""Both together. Tokens that are sent once, and that in parts, are searched only if no others may be: large searches
would take a third longer."""
SENT_ONCE = tuple(TokenDispatch(True, chunks) for chunks in DISPATCH_CHUNKS)
"""What is searched then."""


class PlanRequestError(ValueError):
    """The request is invalid; the message says what to change."""


@dataclass(frozen=True)
class SearchConstraints:
    """Knobs fixed to some values, and values that are excluded."""

    allowed: Mapping[str, frozenset[str]] = field(default_factory=dict)
    excluded: Mapping[str, frozenset[str]] = field(default_factory=dict)

    def allows(self, knob: str, value: object) -> bool:
        """Whether a knob may have this value."""
        text = str(value).lower()
        return text in self.allowed.get(knob, (text,)) and text not in self.excluded.get(knob, ())

    def joined(self, more: "SearchConstraints", option: str) -> "SearchConstraints":
        """Both together; raises `PlanRequestError` where `option` contradicts what is fixed or excluded already."""
        both = dict(self.allowed)
        for knob, values in more.allowed.items():
            wanted = f"{option} {knob}={'|'.join(sorted(values, key=_as_number))}"
            both[knob] = values & self.allowed.get(knob, values)
            if not both[knob]:
                held = "|".join(sorted(self.allowed[knob], key=_as_number))
                raise PlanRequestError(
                    f"{wanted} contradicts --fix or --exclude, which hold {knob}={held}: remove {knob} from one of them"
                )
            if values <= self.excluded.get(knob, frozenset()):
                raise PlanRequestError(f"{wanted} contradicts --exclude {','.join(sorted(values))}: remove one of them")
        return replace(self, allowed=both)

    def allows_compile(self, compiled: bool) -> bool:
        """Whether blocks may be compiled, or not: only if `compile` is fixed, since a dry run cannot verify it."""
        return str(compiled).lower() in self.allowed.get("compile", ("false",))


def parse_constraints(fix: str = "", without: str = "", option: str = "--fix") -> SearchConstraints:
    """Parse `tp=8,pp=4` and `pp,zbv`; several values of one knob are joined by `|`. `option` is the user's option."""
    fixed: dict[str, frozenset[str]] = {}
    for word in _words(fix):
        knob, _, values = word.partition("=")
        knob = knob.strip()
        if knob not in KNOBS:
            raise PlanRequestError(
                f'{option}: "{word}" must be a knob and its value, such as tp=8: {suggest_name(knob, [*KNOBS])}'
            )
        if knob in fixed:
            both = "|".join([*sorted(fixed[knob], key=_as_number), values])
            raise PlanRequestError(f"{option} names {knob} twice: write {knob}={both} for either of them")
        fixed[knob] = _values(option, knob, values)
    excluded: dict[str, frozenset[str]] = {}
    for word in _words(without):
        if word in (*DENSE_AXES, "ep"):
            if word in fixed:
                raise PlanRequestError(f"--fix and --exclude both name {word}: --exclude {word} is --fix {word}=1")
            fixed[word] = frozenset({"1"})
        elif word in SEARCHED_SCHEDULES:
            excluded["schedule"] = excluded.get("schedule", frozenset()) | {word}
        elif word in CONTEXT_KINDS:
            excluded["context"] = excluded.get("context", frozenset()) | {word}
        elif word in RECOMPUTE_MODES:
            excluded["recompute"] = excluded.get("recompute", frozenset()) | {word}
        elif word in TOKEN_DISPATCHERS:
            excluded["dispatcher"] = excluded.get("dispatcher", frozenset()) | {word}
        else:
            known = [*DENSE_AXES, "ep", *CONTEXT_KINDS, *SEARCHED_SCHEDULES, *RECOMPUTE_MODES, *TOKEN_DISPATCHERS]
            raise PlanRequestError(
                f'--exclude: "{word}" is neither an axis, a kind of `cp`, a schedule, a recompute nor a dispatcher: '
                f"{suggest_name(word, known)}"
            )
    return SearchConstraints(fixed, excluded)


_BOOLEAN = ("true", "false")
_NAMED = {
    "context": CONTEXT_KINDS,
    "schedule": SEARCHED_SCHEDULES,
    "recompute": RECOMPUTE_MODES,
    "reshard": _BOOLEAN,
    "regather": _BOOLEAN,
    "compile": _BOOLEAN,
    "dispatcher": TOKEN_DISPATCHERS,
}
"""Knobs whose values are names."""
_NUMBERED = {"virtual": (1, *STAGES_PER_RANK), "chunks": DISPATCH_CHUNKS}
"""Knobs of which not every number is searched."""


def _values(option: str, knob: str, text: str) -> frozenset[str]:
    """The values given for one knob, after checking that each is valid."""
    words = [value.strip().lower() for value in text.split("|")]
    example = " or ".join(_NAMED[knob]) if knob in _NAMED else "N"
    for word in words:
        if not word:
            raise PlanRequestError(f"{option}: {knob} has no value: write {knob}={example}")
        if knob in _NAMED and word not in _NAMED[knob]:
            raise PlanRequestError(f"{option}: {knob}={word} is unknown: {suggest_name(word, [*_NAMED[knob]])}")
        if knob not in _NAMED and not (word.isdecimal() and int(word)):
            raise PlanRequestError(f"{option}: {knob}={word}: must be an integer of 1 or more: write {knob}=N")
        if knob in _NUMBERED and int(word) not in _NUMBERED[knob]:
            searched = ", ".join(map(str, _NUMBERED[knob]))
            raise PlanRequestError(f"{option}: {knob}={word}: must be a number that is searched: {searched}")
    return frozenset(words)


def _as_number(text: str) -> tuple[int, str]:
    return (int(text) if text.isdecimal() else 0, text)


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """Which layout is best for this recipe on this many chips of this cluster?"""

    recipe: Recipe
    cluster: Cluster
    chips: int
    constraints: SearchConstraints = SearchConstraints()
    reserve: float = field(default_factory=default_reserve)
    """Share of a chip's memory to keep free; by default so much that 95 % of the published runs would have fit."""
    expert_imbalance: float = 1.0
    """Tokens of the fullest expert rank over the mean."""

    def __post_init__(self) -> None:
        if not isinstance(self.recipe.model, Model):
            raise PlanRequestError(
                f'the model "{self.recipe.model.name}" is a custom module, which the cost model cannot price: '
                "describe it by its shape under [model], or choose its layout by hand"
            )
        if not 1 <= self.chips <= self.cluster.chips:
            raise PlanRequestError(
                f'{self.chips:,} chips were requested, but "{self.cluster.name}" has {self.cluster.chips:,}: '
                f"--chips {self.cluster.chips} or fewer"
            )
        per_node, nodes = self.cluster.chips_per_node, nodes_used(self.chips, self.cluster)
        if nodes > self.cluster.chips // per_node:
            raise PlanRequestError(
                f"{self.chips:,} ranks spread evenly over {nodes:,} nodes ({self.chips // nodes} on each), but "
                f'"{self.cluster.name}" has {self.cluster.chips // per_node:,} nodes of {per_node} chips: '
                f"--chips {closest_multiple(self.chips, per_node)}, or another multiple of {per_node}"
            )
        length = self.recipe.batch.length
        if self.model.position == "learned" and length > self.model.sequence:
            raise PlanRequestError(
                f"sequences of {length:,} tokens were requested, but the learned positions of the model "
                f'"{self.model.name}" end at {self.model.sequence:,}: a `batch.length` up to that, or '
                f"`sequence = {length}` under [model]"
            )
        if self.expert_imbalance > 1 and not self.model.moe:
            raise PlanRequestError(
                f'--imbalance has no effect: the model "{self.model.name}" has no experts; omit the option, or '
                "add a table [model.moe]"
            )
        if self.dtype not in self.cluster.chip.peak:
            known = " or ".join(f'"{name}"' for name in ("fp32", "bf16") if name in self.cluster.chip.peak)
            raise PlanRequestError(
                f'the recipe computes in {self.dtype}, but the chip of "{self.cluster.name}" states no peak for it, so '
                f"its speed cannot be predicted: [precision] compute = {known}, or add {self.dtype} to the "
                "cluster's [chip.peak]"
            )

    @property
    def model(self) -> Model:
        """The shape of the model."""
        return self.recipe.decoder

    @property
    def dtype(self) -> ComputeDtype:
        """Precision of compute."""
        return self.recipe.precision.compute

    @property
    def matmul_dtype(self) -> Dtype:
        """Precision of the matrix products: fp8 if they are quantized and the chip has it, else that of compute."""
        return self.recipe.precision.peak_dtype(self.cluster.chip.peak)

    @property
    def peak(self) -> float:
        """FLOP/s of one chip in that precision."""
        return self.cluster.chip.peak[self.matmul_dtype]

    @property
    def usable_memory(self) -> float:
        """Bytes of one chip that a plan may use."""
        return self.cluster.chip.memory * (1 - self.reserve)

    @cached_property
    def parsed_recipe(self) -> ParsedSpec[Recipe]:
        """The recipe in the form that the rules of `spec` read."""
        return ParsedSpec(self.recipe, TomlDocument(Path("recipe"), {}, {}))
