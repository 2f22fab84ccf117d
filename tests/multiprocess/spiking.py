"""Train with spikes at known places, and without the samples that a rewind passed over: by the product's own loop."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.tensor import DTensor

from danlu.comm.mesh import build_mesh
from danlu.comm.world import World
from danlu.framework.batch_loader import BatchLoader
from danlu.framework.build import ForwardBackward, build_train_state
from danlu.framework.checkpoint_manager import CheckpointManager
from danlu.framework.event_writer import RankEvents
from danlu.framework.loop import TrainStages, run_training_loop
from danlu.framework.stages import FixedData
from danlu.framework.state import TrainState
from danlu.spec.event import Event, ResumeEvent, SpikeEvent, StepEvent
from danlu.spec.model import Model
from danlu.spec.plan import Plan
from danlu.spec.recipe import BatchConfig, CheckpointConfig, DataConfig, LRSchedule, OptimizerConfig, Recipe
from danlu.spec.spikes import SpikeConfig
from danlu.storage.checkpoint.engine import open_checkpoint_engine

VOCABULARY, LENGTH, SEQUENCES = 256, 16, 32
SHAPE = Model(vocabulary=VOCABULARY, layers=1, width=16, heads=2, mlp_width=32, sequence=LENGTH)

Kind = Literal["garbage", "loss", "gradient", "weights", "not finite"]
Range = tuple[int, int]
"""First sample, and the first after the last."""


@dataclass(frozen=True)
class Injection:
    """A spike at a place in the data: whoever reads that batch has it, and nobody else."""

    cursor: int
    kind: Kind
    size: float = 1.0
    """Factor of the loss, the gradients or the weights."""
    rank: int | None = None
    """The only rank that sees it; all if None."""


def spike_recipe(steps: int, policy: str = "rewind", **changes: Any) -> Recipe:
    """A small model that learns, saves often, and looks for spikes after 32 steps."""
    spikes = {"policy": policy, "window": 64} | changes.pop("spikes", {})
    settings: dict[str, Any] = {
        "name": "spikes",
        "seed": 5,
        "steps": steps,
        "model": SHAPE,
        "data": DataConfig(shards="none"),
        "batch": BatchConfig(sequences=SEQUENCES, length=LENGTH),
        "optimizer": OptimizerConfig(learning_rate=3e-3),
        "schedule": LRSchedule(kind="wsd", warmup=min(20, steps), decay=steps // 5),
        "checkpoint": CheckpointConfig(every=10 if policy == "rewind" else 0, keep=2, scrub=0.0),
        "spikes": SpikeConfig(**spikes),
    }
    return Recipe(**settings | changes)


@lru_cache
def _text() -> NDArray[np.uint8]:
    """The sources of Danlu, as bytes."""
    files = sorted((Path(__file__).parents[2] / "src" / "danlu").rglob("*.py"))
    return np.frombuffer(b"\n".join(file.read_bytes() for file in files), np.uint8)


@dataclass(frozen=True)
class TextSamples:
    """Pieces of Python source by number; some are garbage, and some numbers are left out of the order."""

    garbage: Sequence[Range] = ()
    left_out: Sequence[Range] = ()
    """In order, as numbers of the full order."""

    def read_samples(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.stack([self._row(self._number(int(index))) for index in indices])

    def _number(self, index: int) -> int:
        for first, end in self.left_out:
            if index >= first:
                index += end - first
        return index

    def _row(self, number: int) -> NDArray[np.int64]:
        draw = np.random.default_rng(number)
        if any(first <= number < end for first, end in self.garbage):
            return draw.integers(128, VOCABULARY, LENGTH + 1)
        at = draw.integers(len(_text()) - LENGTH - 1)
        return _text()[at : at + LENGTH + 1].astype(np.int64)


def with_injections(
    forward_backward: ForwardBackward, state: TrainState, injections: Mapping[int, Injection], rank: int
) -> ForwardBackward:
    """Forward and backward that spike at the injections' places in the data."""

    def passes(*batch: Any) -> Tensor:
        found = injections.get(state.cursor)
        if found is not None and found.rank not in (None, rank):
            found = None
        if found is not None and found.kind == "weights":
            with torch.no_grad():
                for parameter in state.parameters():
                    parameter.mul_(found.size)
        loss = forward_backward(*batch)
        if found is not None and found.kind in ("gradient", "not finite"):
            for parameter in state.parameters():
                assert parameter.grad is not None
                grad = parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad
                grad.mul_(found.size if found.kind == "gradient" else torch.nan)
        return loss * found.size if found is not None and found.kind == "loss" else loss

    return passes


@dataclass
class SpikeRun:
    """What a run did."""

    state: TrainState
    events: list[Event] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    kills: int = 0
    """Processes that died on the way."""

    @property
    def spikes(self) -> list[SpikeEvent]:
        return [event for event in self.events if isinstance(event, SpikeEvent)]

    @property
    def steps(self) -> dict[int, StepEvent]:
        """The steps of the branch that was taken."""
        taken: dict[int, StepEvent] = {}
        for event in self.events:
            if isinstance(event, StepEvent):
                taken[event.step] = event
            elif isinstance(event, ResumeEvent):
                taken = {step: each for step, each in taken.items() if step <= event.step}
            elif isinstance(event, SpikeEvent) and event.rewound_to is not None:
                taken = {step: each for step, each in taken.items() if step <= event.rewound_to}
        return taken

    def curve(self) -> list[tuple[int, float, float]]:
        """Step, loss and norm, to the last bit."""
        return [(step, event.loss, event.norm) for step, event in sorted(self.steps.items())]

    @property
    def passed_over(self) -> list[Range]:
        """Samples that no step of the branch that was taken has read."""
        ranges: list[Range] = []
        for spike in self.spikes:
            if spike.rewound_to is not None:
                end = spike.first_sample + SEQUENCES
                first = end - spike.lost_samples
                ranges = [each for each in ranges if each[0] < first] + [(first, end)]
        return ranges


class _Events(RankEvents):
    """Keeps the events of any rank in a list, and calls `after` with each."""

    def __init__(self, run: SpikeRun, after: Callable[[Event], None]) -> None:
        super().__init__(rank=0)
        self.run, self.after = run, after

    def write(self, event: Event) -> None:
        self.run.events.append(event)
        self.after(event)

    def warn(self, message: str) -> None:
        self.run.warnings.append(message)


def _nothing(event: Event) -> None:
    pass


@contextmanager
def prepared(
    recipe: Recipe,
    folder: Path | None,
    injections: Sequence[Injection] = (),
    left_out: Sequence[Range] = (),
    *,
    plan: Plan | None = None,
    after: Callable[[Event], None] = _nothing,
    stop: Callable[[SpikeRun], bool] = lambda run: False,
) -> Iterator[tuple[SpikeRun, Callable[[], None]]]:
    """A run that continues what is in `folder`, and the function that trains it to its end."""
    plan = plan or Plan()
    mesh = build_mesh(plan, World.adopt(), None, experts=False)
    state, forward_backward = build_train_state(recipe, plan, mesh)
    run = SpikeRun(state)
    events = _Events(run, after)
    garbage = [(each.cursor, each.cursor + SEQUENCES) for each in injections if each.kind == "garbage"]
    batches = BatchLoader(TextSamples(garbage, left_out), recipe.batch, VOCABULARY, mesh, prefetch=0)
    passes = with_injections(forward_backward, state, {each.cursor: each for each in injections}, mesh.rank)
    if folder is None:
        stages = TrainStages(FixedData(batches), passes, events=events, stop_requested=lambda: stop(run))
        yield run, lambda: run_training_loop(recipe, state, mesh, stages)
        return
    engine = open_checkpoint_engine(folder, recipe.checkpoint.keep, mesh.world, plan.degrees.model_dump())
    manager = CheckpointManager(engine, recipe.checkpoint, mesh.rank, events)
    try:
        manager.resume(state)
        stages = TrainStages(FixedData(batches), passes, manager, events=events, stop_requested=lambda: stop(run))

        def train() -> None:
            run_training_loop(recipe, state, mesh, stages)
            manager.close()

        yield run, train
    finally:
        engine.abort()


def trained(recipe: Recipe, folder: Path | None = None, *arguments: Any, **settings: Any) -> SpikeRun:
    """Train to the end; `prepared` has the arguments."""
    with prepared(recipe, folder, *arguments, **settings) as (run, train):
        train()
    return run


def same_tensors(one: TrainState, other: TrainState) -> bool:
    """Whether two states of this rank are equal to the last bit."""
    a, b = one.tensors(), other.tensors()
    return a.keys() == b.keys() and all(torch.equal(_local(a[name]), _local(b[name])) for name in a)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class Killed(BaseException):
    """Ends a process at once: nothing may catch it."""


def trained_with_kills(
    recipe: Recipe, folder: Path, injections: Sequence[Injection], kill: Callable[[SpikeEvent], bool]
) -> SpikeRun:
    """Train to the end; after every new spike for which `kill` is true the process dies, and another one resumes."""
    killed: set[int] = set()
    events: list[Event] = []

    def after(event: Event) -> None:
        if isinstance(event, SpikeEvent) and event.first_sample not in killed and kill(event):
            killed.add(event.first_sample)
            raise Killed

    while True:
        with prepared(recipe, folder, injections, after=after) as (run, train):
            try:
                train()
            except Killed:
                events += run.events
                continue
        run.events[:0] = events
        run.kills = len(killed)
        return run


@dataclass(frozen=True)
class Outcome:
    """A run with injected spikes against one that never met them."""

    spikes: list[SpikeEvent]
    missed: list[Injection]
    """Injections that were not found in their own step."""
    false_alarms: list[SpikeEvent]
    """Spikes that were not injected."""
    equal: bool
    """Whether losses, norms and the final state equal those of the reference, bit for bit."""
    compared: int
    """Steps that were compared."""


def compare_with_reference(
    recipe: Recipe, folder: Path | None, injections: Sequence[Injection], plan: Plan | None = None
) -> Outcome:
    """Train, then train a run that looks for nothing: on data without what was passed over, or skipping what is NaN."""
    run = trained(recipe, folder, injections, plan=plan)
    found = {spike.first_sample: spike for spike in run.spikes}
    quiet = recipe.model_copy(update={"spikes": SpikeConfig(policy="off")})
    if recipe.spikes.policy == "rewind":
        reference = trained(quiet, None, (), run.passed_over, plan=plan)
        same = run.curve() == reference.curve()
    else:
        reference = trained(quiet, None, [Injection(each.cursor, "not finite") for each in injections], plan=plan)
        applied = [(point, other) for point, other in zip(run.curve(), reference.curve(), strict=True)]
        same = all(point == other for point, other in applied if run.steps[point[0]].committed)
    places = {each.cursor for each in injections}
    return Outcome(
        spikes=run.spikes,
        missed=[each for each in injections if each.cursor not in found],
        false_alarms=[spike for spike in run.spikes if spike.first_sample not in places],
        equal=same and same_tensors(run.state, reference.state),
        compared=len(run.curve()),
    )
