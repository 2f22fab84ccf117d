"""Verify on a few tokens that a tensor-parallel module computes what the unsharded one does.

A TP plan can be wrong without any error: a fused matrix of queries, keys and values that is sharded by columns gives
every rank a different mixture of the three. So before the first step both are run and compared.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from danlu.framework.custom.construct import CustomModelError
from danlu.framework.custom.forward_trace import get_hidden_states, get_logits
from danlu.framework.custom.module_structure import ModuleStructure
from danlu.framework.layer_seeds import LayerSeeds
from danlu.parallel.fsdp import reshard_all
from danlu.torch_compat import detect_fake_mode, tree_map

TP_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}
"""Relative to the largest value, by the dtype that the module computes in."""


class ReferenceOutputs:
    """The unsharded module's logits for some tokens, and the output of each of its layers."""

    def __init__(
        self,
        module: nn.Module,
        structure: ModuleStructure,
        shape: tuple[int, int],
        vocabulary: int,
        seeds: LayerSeeds | None = None,
    ) -> None:
        """Without dropout; with the `seeds` of the module's layers, as in the first step of a run of seed 0."""
        self.tokens = torch.arange(shape[0] * shape[1]).view(shape) * 7919 % vocabulary
        self.hidden_states: list[Tensor] = []
        hooks = [
            module.get_submodule(name).register_forward_hook(partial(_keep, self.hidden_states))
            for name in structure.blocks
        ]
        self.logits = _forward(module, self.tokens, seeds)
        for hook in hooks:
            hook.remove()

    def verify(self, stage_module: nn.Module, layer_range: range, device: torch.device, tp: int, tp_rank: int) -> None:
        """Run a stage module, all ranks of `tp` together; a different result is an error."""
        actual, expected = self._both(stage_module, layer_range, device, tp, tp_rank)
        _compare(actual, expected, tp)

    def dropout_matches(
        self,
        stage_module: nn.Module,
        layer_range: range,
        device: torch.device,
        tp: int,
        tp_rank: int,
        seeds: LayerSeeds,
    ) -> bool:
        """Whether a stage module draws the dropout masks of the unsharded one; called by all ranks of `tp` together."""
        buffers = {name: buffer.clone() for name, buffer in stage_module.named_buffers()}
        actual, expected = self._both(stage_module, layer_range, device, tp, tp_rank, seeds)
        for name, buffer in stage_module.named_buffers():
            buffer.copy_(buffers[name])  # a forward in training mode may change them
        return _deviation(actual, expected) <= TP_TOLERANCE[actual.dtype]

    def _both(
        self,
        stage_module: nn.Module,
        layer_range: range,
        device: torch.device,
        tp: int,
        tp_rank: int,
        seeds: LayerSeeds | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The output of the stage module, and that of the unsharded module."""
        last = layer_range.stop == len(self.hidden_states) or not self.hidden_states
        given = self.tokens if layer_range.start == 0 else self.hidden_states[layer_range.start - 1]
        expected = self.logits if last else self.hidden_states[layer_range.stop - 1]
        actual = _run(stage_module, given.to(device), tp, seeds).cpu()
        reshard_all(stage_module)
        if actual.shape[-1] != expected.shape[-1]:
            expected = expected.chunk(tp, dim=-1)[tp_rank]
        return actual, expected


class ExampleReference:
    """The unsharded module's output for an input that the user gave."""

    def __init__(self, module: nn.Module, example: Any) -> None:
        self.example = example
        self.expected = _run(module, _on_device_of(module, example), tp=1)

    def check(self, module: nn.Module, tp: int) -> None:
        """Run the sharded module on it; a different result is an error."""
        actual = _run(module, _on_device_of(module, self.example), tp)
        _compare(actual, self.expected.to(actual.device), tp)


def _on_device_of(module: nn.Module, given: Any) -> Any:
    """An input, on the device of the module: the full module may be on the host, and the sharded one is not."""
    device = next(module.parameters()).device
    return tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, given)


def has_real_tensors() -> bool:
    """Whether tensors have values: FakeTensors of a dry run do not."""
    return detect_fake_mode() is None


def _run(module: nn.Module, given: Any, tp: int, seeds: LayerSeeds | None = None) -> Tensor:
    try:
        return _forward(module, given, seeds)
    except RuntimeError as error:
        raise _wrong(tp, f"the module fails with it: {error}") from error


def _forward(module: nn.Module, given: Any, seeds: LayerSeeds | None = None) -> Tensor:
    """A forward without dropout, unless there are `seeds`: without them the masks would differ."""
    module.train(seeds is not None)
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            if seeds is not None:
                seeds.begin_step(0, 0, 0)
            return get_logits(module(given))
    finally:
        module.train()


def _deviation(actual: Tensor, expected: Tensor) -> float:
    return float((actual.float() - expected.float()).abs().max() / expected.abs().max())


def _compare(actual: Tensor, expected: Tensor, tp: int) -> None:
    deviation = _deviation(actual, expected)
    if not deviation <= TP_TOLERANCE[actual.dtype]:
        kinds = ("the tensor-parallel output", "the unsharded one") if tp > 1 else ("its output", "that without it")
        raise _wrong(tp, f"{kinds[0]} differs from {kinds[1]} by {deviation:.1%} of its largest value")


def _keep(hidden_states: list[Tensor], module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
    hidden_states.append(get_hidden_states(output))


def _wrong(tp: int, message: str) -> CustomModelError:
    if tp == 1:
        return CustomModelError("model.use_kernels", f"is true, but {message}", "use_kernels = false")
    return CustomModelError(
        "degrees.tp",
        f"is {tp}, but {message}",
        "in [model.tensor], shard queries, keys and values as separate matrices, and in the module write shapes "
        "with -1 heads: a rank has only some of them",
    )
