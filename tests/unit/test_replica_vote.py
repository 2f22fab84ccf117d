"""Who is named when replicas differ, and what they are compared by."""

from math import inf, nan
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from danlu.comm.world import World
from danlu.framework.replica_vote import ReplicaVote, describe_vote
from danlu.framework.state import TrainState
from danlu.framework.state_snapshots import StateSnapshots
from danlu.spec.resilience import ResilienceConfig


class State:
    """One tensor that no step changes."""

    def __init__(self) -> None:
        self.step, self.weight = 0, torch.zeros(100)

    def tensors(self) -> dict[str, Tensor]:
        return {"model.weight": self.weight}

    model_tensors = tensors

    def named_parameters(self) -> list[tuple[str, Tensor]]:
        return [("weight", self.weight)]

    def scalars(self) -> dict[str, int]:
        return {"step": self.step}


class Voter:
    """Hears what this rank votes for."""

    def __init__(self) -> None:
        self.votes: list[int] = []

    def check(self, checksum: int, step: int) -> str:
        self.votes.append(checksum)
        return ""


def votes(folder: Path, squares: list[float]) -> list[int]:
    """Of a replica whose gradients had these squared norms."""
    state, voter = State(), Voter()
    folder.mkdir(exist_ok=True)
    snapshots = StateSnapshots.open(
        folder, cast(TrainState, state), World(), ResilienceConfig(), None, cast(ReplicaVote, voter), print
    )
    assert snapshots is not None
    for square in squares:
        state.step += 1
        snapshots.take_if_due(cast(TrainState, state), square)
    snapshots.close()
    return voter.votes


def test_a_gradient_that_differs_is_voted_on_even_if_no_state_shows_it(tmp_path: Path) -> None:
    right = votes(tmp_path / "right", [1.0, 2.0, 3.0])
    assert votes(tmp_path / "also", [1.0, 2.0, 3.0]) == right
    wrong = votes(tmp_path / "wrong", [1.0, inf, 3.0])
    assert [one == other for one, other in zip(right, wrong, strict=True)] == [True, False, False]
    assert votes(tmp_path / "nan", [nan]) == votes(tmp_path / "other", [-nan]) == votes(tmp_path / "inf", [inf])


def test_who_differs_from_most_is_named_and_nobody_else() -> None:
    checksums = {1: 7, 3: 7, 5: 8, 7: 7}
    assert "the state of rank 5 after step 12 is not that of its replicas, ranks 1, 3, 7" in describe_vote(
        checksums, 5, 12
    )
    assert [describe_vote(checksums, rank, 12) for rank in (1, 3, 7)] == ["", "", ""]


def test_without_a_majority_all_are_suspects() -> None:
    for checksums in ({0: 1, 1: 2}, {0: 1, 1: 1, 2: 2, 3: 2}, {0: 1, 1: 2, 2: 3}):
        for rank in checksums:
            words = describe_vote(checksums, rank, 3)
            assert f"ranks {', '.join(map(str, checksums))} must be equal after step 3" in words
            assert "set `resilience.vote` to false" in words
