"""A linear layer whose three products (forward, and the gradients of input and weight) are of block-scaled fp8.

Shapes: T tokens, K inputs, N outputs.
"""

import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Shard

from danlu.chips.scaled_matmul import block_scaled_mm
from danlu.framework.fp8.quantize import BlockFormat, Quantized
from danlu.torch_compat import is_gradient_wanted, tensor_version


class QuantizedInput:
    """An input in the two forms that products need: along its features, and along its tokens for the weight's gradient.

    The second is all that is kept for the backward pass: one byte an element, whatever dtype the input has.
    """

    def __init__(self, x: Tensor, form: BlockFormat) -> None:
        self.rows_TK = form.quantize_rows(x.flatten(0, -2))
        self.version = tensor_version(x)
        self._tokens_KT: Quantized | None = None

    def by_tokens(self, x: Tensor, form: BlockFormat) -> Quantized:
        """Quantized when the first weight needs its gradient."""
        if self._tokens_KT is None:
            self._tokens_KT = form.quantize_tokens(x)
        return self._tokens_KT


class InputCache:
    """The last input that was quantized: queries, keys and values read the same one, and keep one copy of it."""

    def __init__(self) -> None:
        self._of: weakref.ref[Tensor] | None = None
        self._quantized: QuantizedInput | None = None

    def get(self, given: Tensor, x: Tensor, form: BlockFormat) -> QuantizedInput:
        """`x`, the local part of `given`, quantized now or by the matrix before."""
        kept = self._quantized
        if kept is not None and self._of is not None and self._of() is given and kept.version == tensor_version(x):
            return kept
        self._quantized = made = QuantizedInput(x, form)
        self._of = weakref.ref(given, self._forget)
        return made

    def _forget(self, of: weakref.ref[Tensor]) -> None:
        if self._of is of:
            self._of = self._quantized = None


class BlockScaledProduct:
    """Multiplies by matrices in one format."""

    def __init__(self, form: BlockFormat) -> None:
        self.form = form
        self.enabled = True
        """Off, products are those of the unquantized model."""
        self._inputs = InputCache()

    def __call__(self, given: Tensor, x: Tensor, weight_NK: Tensor) -> Tensor:
        """`x` times the transpose of the weight; `x` is the local part of what the layer was `given`."""
        if not self.enabled:
            return nn.functional.linear(x, weight_NK)
        quantized = self._inputs.get(given, x.detach(), self.form)
        # A view: torch cannot say of a leaf whether the backward pass that runs wants its gradient.
        return _BlockScaledLinear.apply(x, weight_NK.view_as(weight_NK), quantized, self.form)

    def forward_linear(self, linear: nn.Linear, given: Tensor) -> Tensor:
        """The forward of a linear layer, sharded by tensor parallelism or not."""
        weight, bias = linear.weight, linear.bias
        if not isinstance(weight, DTensor):
            y = self(given, given, weight)
            return y if bias is None else y + bias
        mesh, (placement,) = weight.device_mesh, weight.placements
        by_outputs = placement == Shard(0)
        if not isinstance(given, DTensor):  # gathered by the layer itself, which sums the gradient over ranks
            y = self(given, given, weight.to_local())
            return y + bias.to_local() if isinstance(bias, DTensor) else y
        if placement.is_replicate():  # every rank has some of the positions
            y = self(given, given.to_local(), weight.to_local(grad_placements=[Partial()]))
            if isinstance(bias, DTensor):
                y = y + bias.to_local(grad_placements=[Partial()])
            return DTensor.from_local(y, mesh, given.placements, run_check=False)
        x = given.to_local(grad_placements=[Partial()]) if by_outputs else given.to_local()
        y = self(given, x, weight.to_local())
        if isinstance(bias, DTensor):
            if by_outputs:
                y = y + bias.to_local()
            else:  # the sum over ranks has it once
                y = y + bias.to_local(grad_placements=[Partial()]) * (mesh.get_local_rank() == 0)
        return DTensor.from_local(y, mesh, [Shard(y.ndim - 1) if by_outputs else Partial()], run_check=False)

    def multiply_expert(self, x_TK: Tensor, weight_KN: Tensor) -> Tensor:
        """The product of one expert's tokens and its matrix."""
        return self(x_TK, x_TK, weight_KN.t())


class _BlockScaledLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_NK: Tensor, quantized: QuantizedInput, form: BlockFormat) -> Tensor:
        ctx.form, ctx.shape = form, x.shape
        tokens_KT = quantized.by_tokens(x, form) if ctx.needs_input_grad[1] else (None, None)
        ctx.save_for_backward(weight_NK, *tokens_KT)
        y_TN = _multiply(form, quantized.rows_TK, form.quantize_weight(weight_NK), x.dtype)
        return y_TN.unflatten(0, x.shape[:-1])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        form: BlockFormat = ctx.form
        weight_NK, *tokens_KT = ctx.saved_tensors
        needed, edges = ctx.needs_input_grad, ctx.next_functions
        of_input, of_weight = (needed[i] and is_gradient_wanted(edges[i][0]) for i in (0, 1))
        grad = grads[0]
        grad_x = grad_weight = None
        if of_input:
            rows_TN = form.quantize_rows(grad.flatten(0, -2))
            grad_x = _multiply(form, rows_TN, form.quantize_weight(weight_NK.t()), grad.dtype).view(ctx.shape)
        if of_weight:
            grad_weight = _multiply(form, form.quantize_tokens(grad), Quantized(*tokens_KT), weight_NK.dtype)
        return grad_x, grad_weight, None, None


def _multiply(form: BlockFormat, a: Quantized, b: Quantized, dtype: torch.dtype) -> Tensor:
    product: Tensor = block_scaled_mm(
        a.values_RK, a.scales_RC, b.values_RK, b.scales_RC, form.block, dtype, form.native
    )
    return product
