"""Check compiled blocks against eager ones where they run: on the user's machine, inputs and dtypes.

Compilers are wrong at times, for one instruction set and one dtype. The first call of every kind of block is therefore
also run eagerly, forward and backward; a kind that differs runs eagerly from then on.
"""

import time
import warnings
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from danlu.compiler.equivalence import Difference, NamedTensors, find_difference
from danlu.compiler.isolated_run import Forward, IsolatedRuns, wider_dtype
from danlu.compiler.reproduction import write_reproduction
from danlu.torch_compat import tree_leaves

Decide = Callable[[bool], bool]
PERTURBED_RUNS = 2
"""Eager runs on inputs that differ by a rounding: how much the results move is how uncertain they are."""
MOST_KINDS = 16
"""Kinds that are checked. Inputs of ever new shapes would otherwise be run several times each."""


@dataclass(frozen=True, kw_only=True)
class BlockCheck:
    """What the check of one kind of block found."""

    block: str
    seconds: float
    """What the check took, without the first run of the compiled block, which compiles it and is needed anyway."""
    compile_seconds: float
    runs_eagerly: bool
    difference: Difference | None = None
    not_checked: str = ""
    """Why nothing was compared, if so."""
    reproduction: Path | None = None


@dataclass
class CompiledBlockChecks:
    """All checks of the blocks that were compiled together; filled as they are called.

    `decide` makes ranks agree: it gets whether this rank found a difference, and returns whether any did. It is called
    once for every kind, by all ranks that call the block together with inputs of the same shapes, and by no others: a
    rank of another pipeline stage may be waiting for this block, one with other sequences may know the kind.
    """

    decide: Decide | None = None
    reproduce_in: Path | None = None
    done: list[BlockCheck] = field(default_factory=list)
    _eager_kinds: dict[Hashable, bool] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        """What all checks took so far."""
        return sum(check.seconds for check in self.done)

    def runs_eagerly(self, forward: "VerifiedForward", args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether this kind of block must run eagerly; the first call of a kind finds out."""
        kind = forward.kind(args, kwargs)
        if kind not in self._eager_kinds:
            if len(self._eager_kinds) == MOST_KINDS:
                warnings.warn(
                    f"{forward.name} is called with ever new shapes: {MOST_KINDS} kinds of compiled blocks were "
                    "compared with eager ones, further ones are not",
                    RuntimeWarning,
                    stacklevel=2,
                )
            checked = len(self._eager_kinds) < MOST_KINDS
            check = self._check_or_say_why_not(forward, args, kwargs) if checked else _skipped(forward)
            self._eager_kinds[kind] = check.runs_eagerly
            self.done.append(check)
        return self._eager_kinds[kind]

    def _check_or_say_why_not(
        self, forward: "VerifiedForward", args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> BlockCheck:
        """A block that cannot be run beside the step is used unchecked: a check must not end a run that would work."""
        try:
            return self._check(forward, args, kwargs)
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            warnings.warn(f"compiled {forward.name} could not be compared with eager: {why}", RuntimeWarning, 2)
            return _skipped(forward, why, runs_eagerly=self.decide is not None and self.decide(False))

    def _check(self, forward: "VerifiedForward", args: tuple[Any, ...], kwargs: dict[str, Any]) -> BlockCheck:
        began = time.perf_counter()
        runs = IsolatedRuns(forward.block, args, kwargs)
        eager = [runs.run(forward.eager)]
        eager_seconds = time.perf_counter() - began
        if runs.draws_random_numbers:
            warnings.warn(
                f"compiled {forward.name} is not compared with eager: it draws random numbers (dropout), and compiled "
                "code draws others. If its dropout is 0, a wrong compilation would show",
                RuntimeWarning,
                stacklevel=2,
            )
            return BlockCheck(
                block=forward.name,
                seconds=time.perf_counter() - began,
                compile_seconds=0.0,
                runs_eagerly=False,
                not_checked="it draws random numbers, and compiled code draws others",
            )
        eager += [runs.run(forward.eager, perturbation=at + 1) for at in range(PERTURBED_RUNS)]
        truth = _truth(runs, forward.eager) or eager[0]
        compile_began = time.perf_counter()
        compiled = runs.run(forward.compiled)
        compile_seconds = time.perf_counter() - compile_began
        difference = find_difference(truth, eager, compiled)
        differs = difference is not None
        runs_eagerly = self.decide(differs) if self.decide else differs
        reproduction = self._report(forward, runs, difference, eager_seconds) if difference else None
        return BlockCheck(
            block=forward.name,
            seconds=time.perf_counter() - began - compile_seconds,
            compile_seconds=compile_seconds,
            runs_eagerly=runs_eagerly,
            difference=difference,
            reproduction=reproduction,
        )

    def _report(
        self, forward: "VerifiedForward", runs: IsolatedRuns, difference: Difference, eager_seconds: float
    ) -> Path | None:
        """Warn, and write what reproduces the difference."""
        path, where = None, "give `reproduce_in` a folder to get a file that reproduces it"
        if self.reproduce_in is not None:
            try:
                path = write_reproduction(self.reproduce_in, forward.block, runs, forward.eager, difference)
                where = f"`python {path}` runs it again"
            except Exception as error:  # a full disk or a device without memory: the block is wrong nevertheless
                where = f"no file that reproduces it could be written: {type(error).__name__}: {error}"
        warnings.warn(
            f"compiled {forward.name} differs from eager: {difference}. Blocks of this kind run eagerly from now on, "
            f"which is right but slower: forward and backward of one took {1e3 * eager_seconds:.3g} ms, and "
            f"compiling it gains nothing. Set `compile = false` until PyTorch is fixed; {where}",
            RuntimeWarning,
            stacklevel=2,
        )
        return path


class VerifiedForward:
    """The forward of a block: compiled, or eager if the compiled one was found to differ."""

    def __init__(self, block: nn.Module, name: str, compiled: Forward, checks: CompiledBlockChecks) -> None:
        self.block, self.name, self.checks = block, name, checks
        self.eager: Forward = block.forward
        self.compiled = compiled
        self._chosen: dict[Hashable, Forward] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the block; the first call with inputs of new shapes or dtypes may check its kind."""
        signature = self._signature(args, kwargs)
        chosen = self._chosen.get(signature)
        if chosen is None:
            chosen = self.eager if self.checks.runs_eagerly(self, args, kwargs) else self.compiled
            self._chosen[signature] = chosen
        return chosen(*args, **kwargs)

    def kind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Hashable:
        """What blocks must have in common to share a check: class, settings, and shapes and dtypes of all tensors."""
        settings = [
            (name, type(module), key, value)
            for name, module in self.block.named_modules()
            for key, value in vars(module).items()
            if isinstance(value, int | float | str | None) and not key.startswith("_")
        ]
        tensors = [(name, each.shape, each.dtype) for name, each in self.block.named_parameters()]
        return self._signature(args, kwargs), tuple(settings), tuple(tensors)

    def _signature(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Hashable:
        inputs = tuple(
            (leaf.shape, leaf.dtype, leaf.requires_grad) if isinstance(leaf, Tensor) else type(leaf)
            for leaf in tree_leaves((args, kwargs))
        )
        return self.block.training, torch.is_grad_enabled(), tuple(kwargs), inputs


def _truth(runs: IsolatedRuns, eager: Forward) -> NamedTensors | None:
    """The same in a wider dtype; None where the block cannot compute in it, for instance for an operator without it.

    Nor where it communicates: a rank that fails halfway would leave the others waiting.
    """
    if runs.communicates:
        return None
    args, kwargs = runs.call
    try:
        return runs.run(eager, widened=wider_dtype(runs.block, args, kwargs))
    except (RuntimeError, TypeError, NotImplementedError):
        return None


def _skipped(
    forward: VerifiedForward, why: str = f"{MOST_KINDS} kinds were checked before", runs_eagerly: bool = False
) -> BlockCheck:
    return BlockCheck(
        block=forward.name,
        seconds=0.0,
        compile_seconds=0.0,
        runs_eagerly=runs_eagerly,
        not_checked=why,
    )
