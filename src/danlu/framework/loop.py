"""The training loop: it names every stage, and nothing that matters hides elsewhere."""

import time
from collections.abc import Callable
from math import isfinite

from danlu.comm.mesh import Mesh
from danlu.framework.build import ForwardBackward
from danlu.framework.feed import Feed
from danlu.framework.measures import even_experts, measure_step
from danlu.framework.optimizer import learning_rate
from danlu.framework.state import TrainState
from danlu.parallel.norm import clip
from danlu.spec.event import StepReport
from danlu.spec.recipe import Recipe

SKIPS_IN_A_ROW = 10
"""Steps with a loss or norm that is not finite before the run is given up."""


class DivergedError(RuntimeError):
    """Loss or gradient stayed infinite or not a number."""


def train(
    recipe: Recipe,
    state: TrainState,
    forward_backward: ForwardBackward,
    feed: Feed,
    mesh: Mesh,
    memory_peak: Callable[[], int],
    report: Callable[[StepReport], None],
    maybe_save: Callable[[TrainState, bool], None],
    stop: Callable[[], bool],
) -> None:
    """Take steps until the recipe's are done or a rank is asked to stop.

    All ranks see the same measures, so all of them decide alike. `maybe_save` is told when the last step was taken.
    """
    skipped, stopping = 0, False
    while state.step < recipe.steps and not stopping:
        started = time.perf_counter()
        tokens, targets = feed.at(state.cursor)
        state.seed_step(mesh.rank)
        loss = forward_backward(tokens, targets)
        step = measure_step(state, mesh, loss, memory_peak(), stop())

        rate = learning_rate(state.step, recipe.steps, recipe.optimizer, recipe.schedule)
        commit = isfinite(step.loss) and isfinite(step.norm)
        if commit:
            clip(state.parameters(), step.norm, recipe.optimizer.clip)
            state.update(rate)
            even_experts(state)
        state.advance(recipe.batch.sequences)

        report(
            StepReport(
                time=time.time(),
                step=state.step,
                loss=step.loss,
                norm=step.norm,
                learning_rate=rate,
                tokens=recipe.batch.tokens,
                seconds=time.perf_counter() - started,
                memory=step.memory,
                committed=commit,
                imbalance=step.imbalance,
            )
        )
        skipped = 0 if commit else skipped + 1
        if skipped == SKIPS_IN_A_ROW:
            raise DivergedError(
                f"loss {step.loss} and gradient norm {step.norm} must be finite, but were not for {skipped} steps "
                f"up to step {state.step} on all ranks; lower `optimizer.learning_rate`, or resume from an "
                "earlier checkpoint"
            )
        stopping = step.stop
        maybe_save(state, stopping or state.step == recipe.steps)
