"""What every operator declares: its reference, the error it is allowed, and its implementations."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from danlu.torch_compat import below_autograd


@dataclass(frozen=True)
class Implementation:
    """One way to compute an operator and its gradient."""

    name: str
    forward: Callable[..., Any]
    backward: Callable[..., Any]
    about: str
    """What it does, in a line."""
    devices: tuple[str, ...] = ()
    """Types of devices that it is for; none: all."""
    dtypes: tuple[torch.dtype, ...] = ()
    """Those that it is for; none: all."""
    why_not: Callable[[], str | None] = lambda: None
    """Why it cannot be used on this machine, if so."""
    on_cpu: bool = True
    """Whether it is for a CPU too, if it is for all devices."""
    row_bytes: int = 1
    """Of which rows of its tensors must be a multiple."""

    def takes(self, x: Tensor, *others: Tensor) -> bool:
        """Whether it is for tensors like these, of one dtype and device, and can be used."""
        return (
            (not self.dtypes or x.dtype in self.dtypes)
            and (self.row_bytes == 1 or not any(self._leaves_a_rest(each) for each in (x, *others)))
            and self.why_not_on(x.device.type) is None
        )

    def _leaves_a_rest(self, x: Tensor) -> bool:
        """Of a matrix for every expert, both sides are rows in one of the products."""
        return any(size * x.element_size() % self.row_bytes for size in x.shape[1:])

    def why_not_on(self, device_type: str) -> str | None:
        """Why it does not run on a type of device of this machine; None if it does."""
        if device_type == "cpu" and not self.on_cpu:
            return "it is for accelerators"
        if self.devices and device_type not in self.devices:
            return f"it is for {', '.join(self.devices)}"
        return self.why_not()


@dataclass
class Operator:
    """A family's operator. `torch.library` knows it as `danlu::<name>`, and its gradient as `…_backward`.

    Every chip runs it as one operator that keeps the same tensors for its gradient, whatever computes it: a dry run, a
    plan's memory and recompute are the same everywhere.
    """

    name: str
    reference: Callable[..., Any]
    """In plain torch, for any device and dtype; in fp64 what all others are compared with. Compilers see this."""
    allowed_error: Mapping[torch.dtype, float]
    """Of results and gradients against fp64, as a share of the largest value of each."""
    implementations: list[Implementation] = field(default_factory=list)
    """The first is for everything; of those that take a tensor, the last one runs."""
    settings: tuple[tuple[Any, ...], tuple[Any, ...]] = ((), ())
    """What follows the tensors in a call, forward and backward, when implementations are measured."""
    whole_inputs: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())
    """Tensors, by place, that have no rows to be more or fewer of: weights."""
    complete: Callable[[Sequence[Tensor]], None] = lambda drawn: None
    """Writes into drawn integer inputs what a step would have there, when implementations are measured; else 0."""
    chosen: Implementation | None = None
    """What a plan asks for."""

    def implementation(self, x: Tensor, *others: Tensor) -> Implementation:
        """The one that runs on tensors of one dtype and device."""
        if self.chosen is not None:
            if self.chosen.takes(x, *others):
                return self.chosen
            widths = " and ".join(str(each.shape[-1]) for each in (x, *others))
            warnings.warn(
                f"{self.name}: the plan asks for {self.chosen.name}, which does not take {x.dtype} in rows of {widths} "
                f"on {x.device.type}: what is chosen without a plan runs instead, at a cost that nobody has measured",
                RuntimeWarning,
                stacklevel=2,
            )
        return next(each for each in reversed(self.implementations) if each.takes(x, *others))


def no_gradient(*_: Any) -> Any:
    """The backward of an operator that is called where gradients are computed by hand, or not at all."""
    raise RuntimeError("this operator has no gradient: call it inside of a `torch.autograd.Function`")


ROUNDING = {torch.float64: 2.0**-44, torch.float32: 2.0**-20, torch.float16: 2.0**-9, torch.bfloat16: 2.0**-6}
"""Sixteen roundings of fp64, eight of fp32; of bf16 and fp16 one of the result and one of what is between."""


def precise(dtype: torch.dtype) -> torch.dtype:
    """What to compute in: fp32, or fp64 if inputs are."""
    return torch.promote_types(dtype, torch.float32)


def define_operator(
    name: str,
    schema: str,
    run: Callable[..., Any],
    fake: Callable[..., Any],
    save: Callable[..., None] | None = None,
    differentiate: Callable[..., Any] | None = None,
) -> Any:
    """Tell torch of an operator `danlu::<name>`: what runs on every device, and the shapes of its results.

    With `save` and `differentiate`, as `torch.library.register_autograd` has them, it has a gradient. Registered by
    hand: `torch.library.custom_op` takes three times as long a call, which small models would notice.
    """
    torch.library.define(f"danlu::{name}", schema)
    torch.library.impl(f"danlu::{name}", "CompositeExplicitAutograd")(run)
    torch.library.register_fake(f"danlu::{name}")(fake)
    operator = getattr(torch.ops.danlu, name).default
    if save is not None and differentiate is not None:
        torch.library.impl(f"danlu::{name}", "Autograd")(_differentiable(operator, save, differentiate))
    return operator


def _differentiable(
    operator: Callable[..., Any], save: Callable[..., None], differentiate: Callable[..., Any]
) -> Callable[..., Any]:
    class Differentiated(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: Any) -> Any:
            with below_autograd():
                output = operator(*inputs)
            save(ctx, inputs, output)
            return output

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            return differentiate(ctx, *gradients)

    return Differentiated.apply
