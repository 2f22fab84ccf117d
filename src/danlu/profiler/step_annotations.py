"""Annotations for torch's profiler on what a step consists of: stages of the loop, modules, recompute, waiting.

They are put around a rank's objects from outside, and only while it is profiled: training code has none of them.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import wraps
from typing import Any

import torch.distributed as dist
from torch import nn

from danlu.framework.build import ForwardBackward
from danlu.framework.gradient_accumulation import GradientAccumulation
from danlu.framework.loop import TrainStages
from danlu.framework.stages import FixedData
from danlu.memory.recompute import wrap_recomputed
from danlu.parallel.batch import Batch
from danlu.parallel.pipeline import PipelineRunner
from danlu.profiler.profiler_events import MODULE, RECOMPUTE, STAGE, WAIT
from danlu.torch_compat import RecordFunction, is_backward_running
from danlu.torch_compat.pipelining import wrap_schedule_loss


@contextmanager
def annotated_stages(stages: TrainStages, stage_modules: Iterable[nn.Module], compiled: bool) -> Iterator[TrainStages]:
    """The same stages of a step with annotations, inside this context."""
    with ExitStack() as stack:
        for module in stage_modules:
            _annotate_modules(module, compiled, stack)
            if not compiled:  # a compiler would trace the annotation
                stack.callback(wrap_recomputed(module, _annotate_recompute))
        _annotate_loss(stages.forward_backward, stack)
        _annotate_waiting(stack)
        yield replace(
            stages,
            data=FixedData(_AnnotatedBatches(stages.data.at)),
            forward_backward=annotated(f"{STAGE}passes", stages.forward_backward),
            compute_metrics=annotated(f"{STAGE}metrics", stages.compute_metrics),
        )


def annotated(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, annotated."""

    @wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        with RecordFunction(name):
            return function(*args, **kwargs)

    return called


class _AnnotatedBatches:
    def __init__(self, at: Callable[[int], Batch]) -> None:
        self._at = at

    def at(self, cursor: int) -> Batch:
        with RecordFunction(f"{STAGE}batch"):
            return self._at(cursor)


def _annotate_modules(stage_module: nn.Module, compiled: bool, stack: ExitStack) -> None:
    """Annotate the calls of every module; of a compiled block, the block alone."""
    for name, module in stage_module.named_modules():
        inside_block = name.startswith("blocks.") and name.count(".") > 1
        if not (compiled and inside_block):
            calls = _AnnotatedCalls(f"{MODULE}{name}")
            # First and last among the module's hooks: those of FSDP and of tensor parallelism are inside.
            before = module.register_forward_pre_hook(calls.enter, prepend=True)
            after = module.register_forward_hook(calls.leave, always_call=True)
            stack.callback(before.remove)
            stack.callback(after.remove)


class _AnnotatedCalls:
    """The calls of one module that have not returned."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._open: list[RecordFunction] = []

    def enter(self, *_: Any) -> None:
        annotation = RecordFunction(self._name)
        annotation.__enter__()
        self._open.append(annotation)

    def leave(self, *_: Any) -> None:
        """Recompute stops early, by an exception, so a call may end without having returned."""
        self._open.pop().__exit__(None, None, None)


def _annotate_recompute(_name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def called(*args: Any, **kwargs: Any) -> Any:
        if not is_backward_running():
            return function(*args, **kwargs)
        with RecordFunction(RECOMPUTE):
            return function(*args, **kwargs)

    return called


def _annotate_loss(forward_backward: ForwardBackward, stack: ExitStack) -> None:
    """Annotate the loss as if it were a module."""
    name = f"{MODULE}loss"
    if isinstance(forward_backward, GradientAccumulation):
        stack.callback(setattr, forward_backward, "loss", forward_backward.loss)
        forward_backward.loss = annotated(name, forward_backward.loss)
    elif isinstance(forward_backward, PipelineRunner):
        schedule = forward_backward.schedule
        before: list[Callable[..., Any]] = []

        def annotate(loss: Callable[..., Any]) -> Callable[..., Any]:
            before.append(loss)
            return annotated(name, loss)

        wrap_schedule_loss(schedule, annotate)
        stack.callback(wrap_schedule_loss, schedule, lambda _: before[0])


def _annotate_waiting(stack: ExitStack) -> None:
    """Annotate waiting for a collective; functional ones are waited for by an operator, which the profiler sees."""
    work: Any = dist.Work
    stack.callback(setattr, work, "wait", work.wait)
    work.wait = annotated(WAIT, work.wait)
