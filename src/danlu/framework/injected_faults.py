"""Faults that a rank is asked to let happen to itself, in its forward and backward: see `danlu chaos`."""

import ctypes
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from danlu.framework.build import ForwardBackward
from danlu.parallel.batch import Batch
from danlu.resilience.injection import take_request

STRAGGLING_STEPS = 20
STRAGGLING_SHARE = 0.5
_EXPONENT_BIT = 1 << 28
"""Of an fp32 number: a value below 2 grows or shrinks by 2 to the 32nd, and stays finite."""


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
        if fault == "corrupt":
            _flip_a_bit([each for each in self._parameters() if each.grad is not None])
        return loss


def _flip_a_bit(parameters: Sequence[nn.Parameter]) -> None:
    """Flip a high bit of the exponent of one element of a gradient."""
    for parameter in parameters:
        gradient = parameter.grad
        local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
        if local is not None and local.numel() and local.dtype == torch.float32:
            local.view(torch.int32).view(-1)[0].bitwise_xor_(_EXPONENT_BIT)
            return
    sys.stderr.write("`danlu chaos` asked to corrupt a gradient, but this rank has none in fp32: nothing was done\n")
