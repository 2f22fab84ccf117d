"""Random numbers of layers (dropout), the same whichever rank computes a layer."""

import hashlib
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import nn


def hash_seed(*words: int | str) -> int:
    """A seed for `torch.manual_seed` that is a pure function of its arguments."""
    digest = hashlib.blake2b("/".join(map(str, words)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


class LayerSeeds:
    """Seeds every layer of a stage module again in every microbatch.

    A layer's random numbers are a function of the run's seed, the step, the index of the microbatch in the global
    batch, and the layer: not of what its rank computed before, which depends on the layout. Hooks run outside of
    recompute, which restores the RNG state of the first pass itself.
    """

    def __init__(self, stage_module: nn.Module, layers: Mapping[int, nn.Module], microbatches: int) -> None:
        """`layers` by their indices in the full model; a rank's data is `microbatches` per step."""
        self.microbatches = microbatches
        self._step: tuple[int, int] | None = None
        self._data_index = self._microbatch = 0
        stage_module.register_forward_pre_hook(self._next_microbatch)
        for number, layer in layers.items():
            layer.register_forward_pre_hook(partial(self._seed, number))

    def begin_step(self, seed: int, step: int, data_index: int) -> None:
        """The next forward is that of the first microbatch of this step and data shard."""
        self._step = (seed, step)
        self._data_index, self._microbatch = data_index, -1

    def _next_microbatch(self, module: nn.Module, inputs: Any) -> None:
        self._microbatch += 1
        self._seed("before", module, inputs)

    def _seed(self, layer: int | str, module: nn.Module, inputs: Any) -> None:
        if self._step is not None:  # a dry run, or `verify_tp`, is no step
            number = self._data_index * self.microbatches + self._microbatch
            torch.manual_seed(hash_seed(*self._step, number, layer))
