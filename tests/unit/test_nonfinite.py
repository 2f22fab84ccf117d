"""A step whose loss or gradient is not finite leaves everything as it was but the place in the data."""

from collections.abc import Iterator

import brought
import pytest
import torch
from made_loops import MOE, SHAPE, Run, one_rank, own, recipe, samples_of
from torch import Tensor

from danlu.framework.stages import NoCheckpoints
from danlu.framework.state import TrainState
from danlu.framework.step_guard import MAX_SKIPPED_STEPS, DivergedError
from danlu.parallel.batch import Batch
from danlu.spec.model import Model
from danlu.spec.plan import Plan


@pytest.fixture(scope="module", autouse=True)
def _one_rank() -> Iterator[None]:
    with one_rank():
        yield


def trained(run: Run) -> list[dict[str, Tensor]]:
    """Every tensor of the state after each step."""
    states: list[dict[str, Tensor]] = []

    class Kept(NoCheckpoints):
        def save_if_due(self, state: TrainState, last: bool) -> bool:
            states.append({name: tensor.detach().clone() for name, tensor in state.tensors().items()})
            return False

    run.train(Kept())
    return states


def is_same(before: dict[str, Tensor], after: dict[str, Tensor]) -> bool:
    return before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)


def test_a_batch_that_overflows_moves_nothing_but_the_cursor() -> None:
    made = recipe(own("Overflowing", layers=1), steps=5)
    run = Run(made, Plan(), samples_of(made, poison=brought.POISON, poisoned=(19,)))
    states = trained(run)
    assert [report.committed for report in run.reports] == [True, True, False, True, True]
    assert [report.step for report in run.reports] == [1, 2, 3, 4, 5]
    assert is_same(states[1], states[2]), "weights, moments and counts of steps are those before it"
    assert not is_same(states[2], states[3])
    assert all(tensor.isfinite().all() for tensor in states[-1].values())
    assert (run.state.step, run.state.cursor) == (5, 40)


@pytest.mark.parametrize("broken", ["loss", "norm"])
def test_either_loss_or_norm_is_enough_and_router_biases_stay(broken: str) -> None:
    """What overflows here is put in by hand: the decoder has no token that makes it."""
    made = recipe(Model(**SHAPE, moe=MOE), steps=4)
    run = Run(made, Plan(), samples_of(made))
    forward_backward = run.forward_backward

    def overflowing(batch: Batch, counted: Tensor | None = None) -> Tensor:
        loss = forward_backward(batch, counted)
        if run.state.step == 2:
            if broken == "loss":
                return loss * torch.inf
            run.state.parameters()[0].grad *= torch.nan  # type: ignore[operator]
        return loss

    run.forward_backward = overflowing
    states = trained(run)
    assert [report.committed for report in run.reports] == [True, True, False, True]
    assert is_same(states[1], states[2])
    assert not is_same(states[2], states[3])


def test_too_many_in_a_row_end_the_run() -> None:
    made = recipe(own("Overflowing", layers=1), steps=40)
    run = Run(made, Plan(), samples_of(made, poison=brought.POISON, poisoned=tuple(range(8, 320, 8))))
    with pytest.raises(DivergedError, match=rf"not for {MAX_SKIPPED_STEPS} steps up to step {MAX_SKIPPED_STEPS + 1}"):
        trained(run)
    assert [report.committed for report in run.reports] == [True, *[False] * MAX_SKIPPED_STEPS]


def test_a_finite_step_starts_the_count_again() -> None:
    made = recipe(own("Overflowing", layers=1), steps=2 * MAX_SKIPPED_STEPS)
    skipped = [step for step in range(2 * MAX_SKIPPED_STEPS) if step not in (0, MAX_SKIPPED_STEPS)]
    run = Run(made, Plan(), samples_of(made, poison=brought.POISON, poisoned=tuple(8 * step for step in skipped)))
    trained(run)
    assert [number for number, report in enumerate(run.reports) if not report.committed] == skipped
