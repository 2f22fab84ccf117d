"""The mean of several checkpoints' weights, tensor by tensor in bounded memory. No torch."""

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from danlu.storage.checkpoint.boxes import Box, split_box
from danlu.storage.checkpoint.compare import decode_numbers, read_box_bits
from danlu.storage.checkpoint.hash_tree import same_dtype_and_shape
from danlu.storage.checkpoint.manifest import Manifest
from danlu.storage.checkpoint.reader import CheckpointReader
from danlu.storage.checkpoint.single_writer import SourceShard, SourceTensor, write_checkpoint
from danlu.storage.store.base import Store

MODEL_PREFIX = "model."
PIECE_BYTES = 64 << 20
"""Largest piece of a tensor that is averaged at once; three times that in fp64 is held."""


class CheckpointsDifferError(ValueError):
    """Checkpoints that do not hold the same weights, so that they have no mean."""


def average_checkpoints(
    store: Store,
    steps: Sequence[int],
    target: Store,
    prefix: str = MODEL_PREFIX,
    on_bytes: Callable[[int], None] = lambda done: None,
) -> Manifest:
    """Write the mean of the weights of `steps` to `target`, under the last of them.

    `prefix` names the tensors to average (`ema.` for a run's own average); they are written as weights of a model,
    beside the model's other tensors, which are averaged too. Sums are in fp64, and the mean is rounded once.
    Optimizer states are left out. Raises `CheckpointsDifferError` if names, shapes or dtypes differ.
    """
    readers = [CheckpointReader(store, step) for step in steps]
    sources = _sources(readers, prefix)
    tensors = [
        SourceTensor(name, meta.dtype, meta.shape, [
            SourceShard(box, partial(_mean, readers, stored, box, on_bytes))
            for box in split_box(((0,) * len(meta.shape), meta.shape), 4, PIECE_BYTES)
        ])
        for name, stored in sources.items()
        for meta in [readers[-1].manifest.tensors[stored]]
    ]  # fmt: skip
    scalars = readers[-1].manifest.scalars | {"averaged": ",".join(map(str, steps))}
    scalars.pop("step", None)
    return write_checkpoint(target, steps[-1], tensors, scalars)


def bytes_to_read(store: Store, steps: Sequence[int], prefix: str = MODEL_PREFIX) -> int:
    """Bytes that averaging reads, for its progress."""
    readers = [CheckpointReader(store, step) for step in steps]
    metas = [readers[-1].manifest.tensors[name] for name in _sources(readers, prefix).values()]
    return len(steps) * sum(meta.nbytes(meta.shape) for meta in metas)


def _sources(readers: Sequence[CheckpointReader], prefix: str) -> dict[str, str]:
    """The tensors to write, and those they are the mean of."""
    last = readers[-1].manifest
    names = {name: name for name in last.tensors if name.startswith(MODEL_PREFIX)}
    if prefix != MODEL_PREFIX:
        own = {MODEL_PREFIX + name.removeprefix(prefix): name for name in last.tensors if name.startswith(prefix)}
        if not own:
            raise CheckpointsDifferError(f"step {last.step} must have tensors named {prefix}…, but has none")
        names |= own
    for reader in readers[:-1]:
        for name in names.values():
            found = reader.manifest.tensors.get(name)
            if found is None or not same_dtype_and_shape(found, last.tensors[name]):
                has = "does not have" if found is None else f"has with shape {list(found.shape)} in {found.dtype}"
                raise CheckpointsDifferError(
                    f"the checkpoints must hold the same weights, but step {reader.manifest.step} {has} {name}, which "
                    f"has shape {list(last.tensors[name].shape)} in step {last.step}"
                )
    return names


def _mean(readers: Sequence[CheckpointReader], name: str, box: Box, on_bytes: Callable[[int], None]) -> memoryview:
    """The mean of a box of a tensor, in the tensor's dtype."""
    dtype = readers[-1].manifest.tensors[name].dtype
    if dtype not in ("F64", "F32"):
        last = read_box_bits(readers[-1], name, box, on_bytes)
        if any(not np.array_equal(last, read_box_bits(reader, name, box, on_bytes)) for reader in readers[:-1]):
            raise CheckpointsDifferError(f"{name} is {dtype} and differs between the checkpoints, so it has no mean")
        return memoryview(np.ascontiguousarray(last).tobytes())
    total = np.zeros(box[1], np.float64)
    for reader in readers:
        total += np.asarray(decode_numbers(read_box_bits(reader, name, box, on_bytes), dtype), np.float64)
    total /= len(readers)
    return memoryview(np.ascontiguousarray(total.astype(np.float64 if dtype == "F64" else np.float32)).tobytes())
