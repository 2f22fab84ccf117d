"""A model that is whole in one process, with the weights of a checkpoint of any layout."""

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor, nn

from danlu.framework.custom.adapter import materialize
from danlu.framework.custom.construct import build_meta_module
from danlu.framework.decoder.decoder import Decoder
from danlu.spec.custom_model import CustomModel
from danlu.spec.model import Model
from danlu.storage.checkpoint.safetensors_io import OnProgress

_READ_BYTES = 256 << 20
"""Tensors are read in groups of so many bytes, for the progress."""

FillTensors = Callable[[Mapping[str, Tensor]], None]
"""Fills tensors in place, by their names in the model."""


def empty_decoder(model: Model) -> Decoder:
    """The decoder in fp32 on the CPU; its parameters are undefined, its buffers zero."""
    with torch.device("meta"):
        decoder = Decoder(model)
    decoder.to_empty(device="cpu")
    decoder.tie_weights()
    for buffer in decoder.buffers():
        buffer.zero_()
    return decoder


def load_full_model(
    model: Model | CustomModel,
    fill: FillTensors,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    on_progress: OnProgress = lambda done, total: None,
) -> nn.Module:
    """Build a model and fill its parameters and saved buffers; parameters are then rounded to `dtype`.

    It is read in fp32 into this host's memory first.
    """
    if isinstance(model, Model):
        module: nn.Module = empty_decoder(model)
    else:
        module = build_meta_module(model)
        materialize(module, torch.device("cpu"))
    tensors = _saved_tensors(module)
    total, done = sum(tensor.nbytes for tensor in tensors.values()), 0
    with torch.no_grad():
        for group in _groups(tensors):
            fill(group)
            done += sum(tensor.nbytes for tensor in group.values())
            on_progress(done, total)
    for parameter in module.parameters():  # not buffers: rotary frequencies need their precision
        parameter.data = parameter.data.to(dtype)
    return module.to(device).eval()


def _saved_tensors(module: nn.Module) -> dict[str, Tensor]:
    """What a checkpoint holds of a module; a tied parameter once, under its first name."""
    parameters: dict[str, Tensor] = dict(module.named_parameters())
    buffers = dict(module.named_buffers())
    return parameters | {name: tensor for name, tensor in module.state_dict().items() if name in buffers}


def _groups(tensors: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    group: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        group[name] = tensor.detach()
        if sum(each.nbytes for each in group.values()) >= _READ_BYTES:
            yield group
            group = {}
    if group:
        yield group
