"""Faults that a rank is asked to let happen to itself, in its forward and backward: see `danlu chaos`."""

import ctypes
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path

import torch
from torch import Tensor, nn

from danlu.framework.build import ForwardBackward
from danlu.parallel.batch import Batch
from danlu.resilience.injection import take_request
from danlu.storage.checkpoint.local_shards import local_tensor

STRAGGLING_STEPS = 20
STRAGGLING_SHARE = 0.5


class FaultInjection:
    """A forward and backward that looks for a request before it begins; without one it costs a look at a file."""

    def __init__(
        self,
        inner: ForwardBackward,
        run: Path,
        rank: int,
        parameters: Callable[[], Sequence[nn.Parameter]],
        break_connections: Callable[[], None],
    ) -> None:
        self._inner, self._run, self._rank = inner, run, rank
        self._parameters, self._break_connections = parameters, break_connections
        self._slow_steps = 0

    def __call__(self, batch: Batch, counted: Tensor | None = None) -> Tensor:
        """Forward and backward of one batch, with the fault that was asked for."""
        fault = take_request(self._run, self._rank)
        if fault == "exception":
            # None of Danlu's own errors: those explain what is wrong, and a run that meets one ends.
            raise RuntimeError("this error was asked for by `danlu chaos`")
        if fault == "reset":
            self._break_connections()
        elif fault == "lock":
            ctypes.PyDLL(None).sleep(3600)  # a call that keeps Python's lock
        elif fault == "straggle":
            self._slow_steps = STRAGGLING_STEPS
        began = time.perf_counter()
        loss = self._inner(batch, counted)
        if self._slow_steps:
            self._slow_steps -= 1
            time.sleep(STRAGGLING_SHARE * (time.perf_counter() - began))
        if fault == "corrupt" and flip_gradient_bit(self._parameters(), random.Random()) is None:
            sys.stderr.write("`danlu chaos` asked to corrupt a gradient, but this rank has none in fp32\n")
        return loss


@dataclass(frozen=True)
class FlippedBit:
    """What happened to one element of a gradient."""

    bit: int
    """0 is the last of the mantissa, 31 the sign."""
    before: float
    after: float


def flip_gradient_bit(parameters: Sequence[nn.Parameter], dice: random.Random) -> FlippedBit | None:
    """Flip one bit of one element of a gradient of this rank, so that it stays finite; None if none is in fp32."""
    of_rank = [local_tensor(each.grad) for each in parameters if each.grad is not None]
    found = [each for each in of_rank if each.numel() and each.dtype == torch.float32]
    if not found:
        return None
    gradient = dice.choices(found, [each.numel() for each in found])[0].view(-1)
    at = dice.randrange(len(gradient))
    while True:
        bit = dice.randrange(32)
        before, bits = float(gradient[at]), gradient[at : at + 1].view(torch.int32)
        flip = torch.tensor([1 << bit if bit < 31 else -(1 << 31)], dtype=torch.int32, device=bits.device)
        bits.bitwise_xor_(flip)
        after = float(gradient[at])
        if isfinite(after):
            return FlippedBit(bit, before, after)
        bits.bitwise_xor_(flip)
