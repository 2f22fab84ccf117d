"""Give operators their kernels on a device, each of which is compared with its reference before it is used."""

import threading
import warnings
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch

from danlu.language.checking import check_implementation
from danlu.ops.operators.cross_entropy import CROSS_ENTROPY
from danlu.ops.operators.experts import GROUPED_MM
from danlu.ops.operators.gated import GATED_PRODUCT
from danlu.ops.operators.masked_attention import MASKED_ATTENTION
from danlu.ops.operators.norm import RMS_NORM
from danlu.ops.operators.operator import Implementation, Operator, no_gradient
from danlu.ops.operators.quantize import QUANTIZE_ROWS
from danlu.ops.operators.rotary import ROTATE

NAME = "triton"
_DTYPES = torch.float32, torch.bfloat16, torch.float16
"""Of the data that kernels take; they compute in fp32."""


def register_kernels(device_type: str) -> list[str]:
    """Give kernels for a type of device to the operators that have some; returns the operators' names.

    None without Triton. A second call for the same type changes nothing. What is registered is compared with the
    operator's reference before its first use, and not used if it differs.
    """
    if find_spec("triton") is None:
        return []
    registered = []
    for operator, forward, backward in _kernels():
        if not any(each.name == NAME and device_type in each.devices for each in operator.implementations):
            implementation = checked_implementation(operator, forward, backward, device_type)
            operator.implementations.insert(_place(operator, device_type), implementation)
        registered.append(operator.name)
    return registered


def _place(operator: Operator, device_type: str) -> int:
    """At the end, so that the kernel runs; but before torch's product of experts where that is one kernel, too."""
    if operator is GROUPED_MM and why_no_kernels(device_type) is None:
        from danlu.language.launch import current_target

        since = current_target(device_type).torch_grouped_mm
        if since and torch.__version__ >= since:
            names = [each.name for each in operator.implementations]
            return names.index("torch_grouped")
    return len(operator.implementations)


def use_kernels(device: torch.device) -> None:
    """Register kernels for the device of this process; where Triton runs none, a warning says what that costs."""
    if device.type == "cpu":
        return  # has compiled ones of its own
    if reason := why_no_kernels(device.type):
        warnings.warn(
            "norms, activations, rotations, losses and casts to fp8 run as several operators of torch each, which "
            "moves their tensors two to eight times; attention of documents or windows runs document by document, and "
            f"on most chips experts one by one, for which the host waits in every layer: {reason}",
            RuntimeWarning,
            stacklevel=2,
        )
    else:
        register_kernels(device.type)


def checked_implementation(
    operator: Operator, forward: Callable[..., Any], backward: Callable[..., Any], device_type: str
) -> Implementation:
    """An implementation that is used on a type of device if it agrees with the operator's reference there."""
    check = FirstUseCheck(operator, device_type)
    about = "one kernel for any chip that Triton compiles for, computing in fp32"
    made = Implementation(NAME, forward, backward, about, (device_type,), _DTYPES, check.why_not)
    check.implementation = made
    return made


class FirstUseCheck:
    """Compares an implementation with its operator's reference when it is first asked for, and remembers the answer."""

    implementation: Implementation

    def __init__(self, operator: Operator, device_type: str) -> None:
        self.operator, self.device_type = operator, device_type
        self._answer: str | None = None
        self._asked = False
        self._lock = threading.Lock()

    def why_not(self) -> str | None:
        """Why it cannot be used here; None if it can."""
        with self._lock:
            if not self._asked:
                self._answer, self._asked = self._find_out(), True
        return self._answer

    def _find_out(self) -> str | None:
        if reason := why_no_kernels(self.device_type):
            warnings.warn(
                f"the kernel of {self.operator.name} is not used: {reason}; torch computes it instead",
                RuntimeWarning,
                stacklevel=2,
            )
            return reason
        # Inside of an operator autograd is off and a dry run's or recompute's modes are on: a new thread has neither.
        found: list[str | Exception] = []
        index = None if self.device_type == "cpu" else torch.accelerator.current_device_index()
        thread = threading.Thread(target=lambda: found.extend(self._compare(index)))
        thread.start()
        thread.join()
        if not found:
            return None
        answer = f"differs from the reference on {self.device_type}: {found[0]}"
        warnings.warn(
            f"the kernel of {self.operator.name} is not used, because it {answer}; torch computes it instead",
            RuntimeWarning,
            stacklevel=2,
        )
        return answer

    def _compare(self, index: int | None) -> list[str | Exception]:
        """What differs. A kernel that cannot be compiled or run is no better than one that is wrong."""
        device = torch.device(self.device_type) if index is None else torch.device(self.device_type, index)
        try:
            if index is not None:
                torch.accelerator.set_device_index(index)
            return [
                str(difference)
                for dtype in _DTYPES
                for difference in check_implementation(self.operator, self.implementation, device, dtype)
            ]
        except Exception as error:
            return [error]


def why_no_kernels(device_type: str) -> str | None:
    """Why Triton runs nothing on a type of device; None if it does."""
    if find_spec("triton") is None:
        return "triton is not installed: pip install 'danlu[kernels]'"
    from danlu.language.launch import current_target, is_interpreted

    if is_interpreted():
        return None if device_type == "cpu" else "Triton's interpreter is for tensors of the CPU"
    if device_type == "cpu":
        return "Triton compiles for accelerators: on a CPU kernels run in its interpreter alone (TRITON_INTERPRET=1)"
    try:
        current_target(device_type)
    except (ValueError, RuntimeError, AttributeError, KeyError, ImportError) as reason:  # every vendor has its own
        return str(reason)
    return None


def _kernels() -> list[tuple[Operator, Callable[..., Any], Callable[..., Any]]]:
    """Operators with their forward and backward by kernels."""
    from danlu.language import attention, cross_entropy, fp8_cast, gated, grouped_mm, norm, rotary

    return [
        (RMS_NORM, norm.rms_norm, norm.rms_norm_backward),
        (GATED_PRODUCT, gated.gated_product, gated.gated_product_backward),
        (ROTATE, rotary.rotate, rotary.rotate_backward),
        (CROSS_ENTROPY, cross_entropy.softmax_sums, cross_entropy.cross_entropy_backward),
        (MASKED_ATTENTION, attention.attention, attention.attention_backward),
        (GROUPED_MM, grouped_mm.grouped_mm, grouped_mm.grouped_mm_gradient),
        (QUANTIZE_ROWS, fp8_cast.fp8_cast, no_gradient),
    ]
