"""All kernels of this room, by name."""

from danlu.language.adamw import ADAMW
from danlu.language.attention import ATTENTION_FORWARD
from danlu.language.attention_backward import KEYS_BACKWARD, QUERIES_BACKWARD
from danlu.language.cross_entropy import CROSS_ENTROPY_BACKWARD, SOFTMAX_SUMS
from danlu.language.declaration import Kernel
from danlu.language.fp8_cast import FP8_CAST
from danlu.language.gated import GATED_BACKWARD, GATED_FORWARD
from danlu.language.grouped_mm import GROUPED_MM, GROUPED_MM_INPUT, GROUPED_MM_WEIGHT
from danlu.language.norm import RMS_NORM_BACKWARD, RMS_NORM_FORWARD
from danlu.language.rotary import ROTATE

KERNELS: dict[str, Kernel] = {
    kernel.name: kernel
    for kernel in (
        RMS_NORM_FORWARD,
        RMS_NORM_BACKWARD,
        GATED_FORWARD,
        GATED_BACKWARD,
        ROTATE,
        SOFTMAX_SUMS,
        CROSS_ENTROPY_BACKWARD,
        GROUPED_MM,
        GROUPED_MM_INPUT,
        GROUPED_MM_WEIGHT,
        ATTENTION_FORWARD,
        QUERIES_BACKWARD,
        KEYS_BACKWARD,
        ADAMW,
        FP8_CAST,
    )
}
