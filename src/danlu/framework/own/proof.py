"""Proof on a few tokens that a module shared over `tp` computes what the whole one does.

A map can be wrong without any error: a fused matrix of queries, keys and values that is split by columns gives every
rank a different mixture of the three. So before the first step both are run, and held against each other.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._guards import detect_fake_mode

from danlu.framework.own.anatomy import Anatomy
from danlu.framework.own.factory import OwnModelError
from danlu.framework.own.rehearsal import scores_of, stream_of
from danlu.parallel.shard import free_gathered

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}
"""Of the largest value, by the dtype that the module computes in."""


class Expected:
    """What the whole module gives for some tokens, and what leaves each of its layers."""

    def __init__(self, whole: nn.Module, anatomy: Anatomy, shape: tuple[int, int], vocabulary: int) -> None:
        self.tokens = torch.arange(shape[0] * shape[1]).view(shape) * 7919 % vocabulary
        self.streams: list[Tensor] = []
        hooks = [
            whole.get_submodule(name).register_forward_hook(partial(_keep, self.streams)) for name in anatomy.blocks
        ]
        whole.eval()  # dropout would draw differently
        with torch.no_grad():
            self.scores = scores_of(whole(self.tokens))
        for hook in hooks:
            hook.remove()

    def prove(self, part: nn.Module, held: range, device: torch.device, tp: int, tp_rank: int) -> None:
        """Run a part as a whole stage would, all ranks of `tp` together; another result is an error."""
        last = held.stop == len(self.streams) or not self.streams
        given = self.tokens if held.start == 0 else self.streams[held.start - 1]
        wanted = self.scores if last else self.streams[held.stop - 1]
        got = _run(part, given.to(device), tp).cpu()
        free_gathered(part)
        if got.shape[-1] != wanted.shape[-1]:
            wanted = wanted.chunk(tp, dim=-1)[tp_rank]
        _compare(got, wanted, tp)


class OnExample:
    """What a whole module gives for an input of the user's."""

    def __init__(self, whole: nn.Module, example: Any) -> None:
        self.example = example
        self.wanted = _run(whole, example, tp=1)

    def check(self, shared: nn.Module, tp: int) -> None:
        """Run the shared module on it; another result is an error."""
        _compare(_run(shared, self.example, tp), self.wanted, tp)


def can_prove() -> bool:
    """Whether tensors have values: those of a dry run do not."""
    return detect_fake_mode() is None


def _run(module: nn.Module, given: Any, tp: int) -> Tensor:
    """A forward without dropout, which would draw differently."""
    module.eval()
    try:
        with torch.no_grad():
            return scores_of(module(given))
    except RuntimeError as error:
        raise _wrong(tp, f"the module fails when it is shared: {error}") from error
    finally:
        module.train()


def _compare(got: Tensor, wanted: Tensor, tp: int) -> None:
    deviation = float((got.float() - wanted.float()).abs().max() / wanted.abs().max())
    if not deviation <= TOLERANCE[got.dtype]:
        raise _wrong(tp, f"the shared module departs from the whole one by {deviation:.1%} of its largest value")


def _keep(streams: list[Tensor], module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
    streams.append(stream_of(output))


def _wrong(tp: int, message: str) -> OwnModelError:
    return OwnModelError(
        "degrees.tp",
        f"is {tp}, but {message}",
        "in [model.tensor], split queries, keys and values as matrices of their own, and in the module write shapes "
        "with -1 heads: a rank sees only its part of them",
    )
