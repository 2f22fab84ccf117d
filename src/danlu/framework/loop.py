"""The training loop: it names every stage, and nothing that matters hides elsewhere."""

import time
from collections.abc import Callable

from danlu.comm.mesh import Mesh
from danlu.framework.build import ForwardBackward
from danlu.framework.feed import Feed
from danlu.framework.guard import Judge
from danlu.framework.measures import even_experts, measure_step
from danlu.framework.optimizer import learning_rate
from danlu.framework.state import TrainState
from danlu.parallel.norm import clip
from danlu.spec.event import StepReport
from danlu.spec.recipe import Recipe


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
    settle: Callable[[], None] = lambda: None,
) -> None:
    """Take steps until the recipe's are done or a rank is asked to stop.

    All ranks see the same measures, so all of them decide alike. `maybe_save` is told when the last step was taken;
    `settle` returns when nothing of the state is being copied any more, and it may change.
    """
    judge, stopping = Judge(), False
    while state.step < recipe.steps and not stopping:
        started = time.perf_counter()
        tokens, targets = feed.at(state.cursor)
        state.seed_step(mesh.data_index)  # ranks that share sequences draw the same random numbers
        loss = forward_backward(tokens, targets)
        step = measure_step(state, mesh, loss, memory_peak(), stop())

        rate = learning_rate(state.step, recipe.steps, recipe.optimizer, recipe.schedule)
        commit = judge.commit(step.loss, step.norm)
        if commit:
            clip(state.parameters(), step.norm, recipe.optimizer.clip)
            settle()
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
        judge.check(step.loss, step.norm, state.step)
        stopping = step.stop
        maybe_save(state, stopping or state.step == recipe.steps)
