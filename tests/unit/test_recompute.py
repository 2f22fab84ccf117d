"""Recompute: fewer bytes kept, the same gradients, and no matrix product twice where it is selective."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Literal

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from danlu.framework.decoder.decoder import Decoder
from danlu.framework.decoder.init_weights import init_weights
from danlu.framework.decoder.parallelism import decoder_recompute_regions
from danlu.memory.recompute import RecomputeRegion, apply_recompute
from danlu.spec.load import load_model

Mode = Literal["none", "selective", "full"]
MODES: tuple[Mode, ...] = ("none", "selective", "full")


class Made(TorchDispatchMode):
    """Remembers the storage of every tensor that operators make, without keeping it alive; views of weights are not."""

    def __init__(self, weights: Iterable[Tensor]) -> None:
        super().__init__()
        self.storages: dict[StorageWeakRef, int] = {}
        self.weights = {StorageWeakRef(weight.untyped_storage()) for weight in weights}

    def __torch_dispatch__(
        self, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                self.storages[StorageWeakRef(storage)] = storage.nbytes()
        return result

    def bytes_alive(self) -> int:
        alive = {storage: size for storage, size in self.storages.items() if not storage.expired()}
        return sum(size for storage, size in alive.items() if storage not in self.weights)


def decoder(name: str, mode: Mode) -> Decoder:
    model = load_model(name).model_copy(update={"layers": 2})
    made = Decoder(model)
    init_weights([made], model, seed=0)
    apply_recompute(decoder_recompute_regions(made, [mode] * model.layers))
    return made


def batch() -> Tensor:
    return torch.randint(256, (2, 32), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", ["tiny-gpt", "tiny-llama", "tiny-moe"])
def test_each_mode_keeps_fewer_bytes_and_gives_the_same_gradients(name: str) -> None:
    kept: dict[Mode, int] = {}
    gradients: dict[Mode, dict[str, Tensor]] = {}
    for mode in MODES:
        made = decoder(name, mode)
        with Made(made.parameters()) as record:
            loss = made(batch()).square().mean()
        kept[mode] = record.bytes_alive()
        loss.backward()
        gradients[mode] = {at: p.grad for at, p in made.named_parameters() if p.grad is not None}
    assert kept["full"] < 0.6 * kept["selective"] and kept["selective"] < 0.95 * kept["none"], kept
    assert len(gradients["none"]) == len(list(decoder(name, "none").parameters()))
    for mode in ("selective", "full"):
        assert gradients[mode].keys() == gradients["none"].keys(), "names stay as they are"
        for at, gradient in gradients["none"].items():
            assert torch.equal(gradients[mode][at], gradient), (mode, at)


@pytest.mark.parametrize("name", ["tiny-llama", "tiny-moe"])
def test_selective_recompute_repeats_no_matrix_product(name: str) -> None:
    def flops(mode: Mode) -> int:
        made = decoder(name, mode)
        with FlopCounterMode(display=False) as counter:
            made(batch()).square().mean().backward()
        return counter.get_total_flops()

    spent = {mode: flops(mode) for mode in MODES}
    assert spent["selective"] == spent["none"]
    assert 1.2 * spent["none"] < spent["full"] < 1.4 * spent["none"], "one forward pass more: up to a third"


def test_recompute_of_a_region_calls_it_twice() -> None:
    calls = []
    made = decoder("tiny-llama", "none")
    block = made.blocks["0"]
    plain = block.forward
    block.forward = partial(_counted, plain, calls)  # type: ignore[method-assign]
    apply_recompute(decoder_recompute_regions(made, ("full", "none")))
    loss = made(batch()).sum()
    assert len(calls) == 1
    loss.backward()
    assert len(calls) == 2


@pytest.mark.parametrize("name", ["tiny-llama", "tiny-moe"])
def test_layers_may_have_modes_of_their_own(name: str) -> None:
    """Between its neighbors in memory, and the same gradients."""
    kept, gradients = {}, {}
    for modes in (("none", "none"), ("full", "none"), ("none", "full"), ("selective", "full"), ("full", "full")):
        made = decoder(name, "none")
        apply_recompute(decoder_recompute_regions(made, modes))
        with Made(made.parameters()) as record:
            loss = made(batch()).square().mean()
        kept[modes] = record.bytes_alive()
        loss.backward()
        gradients[modes] = [p.grad for p in made.parameters() if p.grad is not None]
    assert kept["full", "full"] < kept["selective", "full"] < kept["none", "full"] < kept["none", "none"], kept
    assert kept["full", "full"] < kept["full", "none"] < kept["none", "none"], kept
    for modes, found in gradients.items():
        assert all(torch.equal(one, other) for one, other in zip(found, gradients["none", "none"], strict=True)), modes


def test_a_stage_recomputes_its_own_layers() -> None:
    """Layers are counted over the model, not from the start of a stage."""
    made = Decoder(load_model("tiny-llama"), range(2, 4), first=False)
    regions = list(decoder_recompute_regions(made, ("full", "full", "none", "selective")))
    assert regions == [RecomputeRegion(made.blocks["3"], "selective")]


def _counted(forward: Callable[..., Tensor], calls: list[int], *given: Any) -> Tensor:
    calls.append(1)
    return forward(*given)
