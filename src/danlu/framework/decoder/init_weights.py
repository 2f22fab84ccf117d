"""Initial values of parameters: a pure function of seed, name and position in the global tensor.

Every rank computes only the elements it holds, and any layout gives the same model to the bit.
"""

import hashlib
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from danlu.parallel.fsdp import local_shard
from danlu.spec.model import Model

_BIASES = (".bias", "_bias")
_MASK = (1 << 63) - 1
_ELEMENTS_AT_ONCE = 1 << 22  # bounds the int64 temporaries to tens of MB


def init_weights(stage_modules: Iterable[nn.Module], model: Model, seed: int) -> None:
    """Fill the parameters and buffers of this rank's stage modules."""
    for stage_module in stage_modules:
        for name, parameter in stage_module.named_parameters():
            deviation = _deviation(name, model)
            with torch.no_grad():
                if deviation is None:
                    zero = name.endswith(_BIASES) or model.zero_centered_norm
                    parameter.fill_(0.0 if zero else 1.0)
                else:
                    _fill_normal(parameter, deviation, _key(seed, name))
        for buffer in stage_module.buffers():
            buffer.zero_()


def _deviation(name: str, model: Model) -> float | None:
    """Standard deviation of a matrix, or None for norms (ones, or zeros if centered there) and biases (zeros).

    GPT-2's scheme: 0.02, and smaller by √(2·layers) where a layer writes to the residual stream.
    """
    if name.endswith(_BIASES) or "norm." in name:
        return None
    writes_to_stream = name.endswith((".o.weight", ".down.weight", ".down"))
    return 0.02 / (2 * model.layers) ** 0.5 if writes_to_stream else 0.02


def _key(seed: int, name: str) -> int:
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") & _MASK


def _fill_normal(parameter: Tensor, deviation: float, key: int) -> None:
    shape = parameter.shape
    local, offset = local_shard(parameter)
    if local.numel() == 0:
        return
    rows = max(1, _ELEMENTS_AT_ONCE // max(1, local.numel() // local.shape[0]))
    for start in range(0, local.shape[0], rows):
        piece = local[start : start + rows]
        index = _global_index(piece, (offset[0] + start, *offset[1:]), shape)
        piece.copy_(_normal(index, key) * deviation)


def _global_index(piece: Tensor, offset: tuple[int, ...], shape: torch.Size) -> Tensor:
    """Position of every element of a shard in the flattened global tensor."""
    index = torch.zeros((), dtype=torch.int64, device=piece.device)
    for size, first, total in zip(piece.shape, offset, shape, strict=True):
        index = index.unsqueeze(-1) * total + torch.arange(first, first + size, device=piece.device)
    return index


def _normal(index: Tensor, key: int) -> Tensor:
    """A standard normal number for every index (Box–Muller over two hashed uniforms)."""
    first, second = _uniform(index * 2, key), _uniform(index * 2 + 1, key)
    return torch.sqrt(-2 * torch.log(first)) * torch.cos(2 * torch.pi * second)


def _uniform(index: Tensor, key: int) -> Tensor:
    """A number in (0, 1] for every index: 24 bits of a multiply-xorshift hash of it."""
    x = index ^ key
    for multiplier, shift in ((-4417276706812531889, 31), (-7723592293110705685, 29), (-4658895280553007687, 32)):
        x = x * multiplier
        x = x ^ ((x >> shift) & (_MASK >> (shift - 1)))
    return (((x >> 40) & 0xFFFFFF) + 1).float() / (1 << 24)
