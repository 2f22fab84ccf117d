"""Weights in safetensors files: written and read one slice at a time.

A folder holds `<stem>-00001-of-0000N.safetensors` and an index that maps tensors to files, as Hugging Face models are
published; a single `<stem>.safetensors` without an index is read too.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from danlu.spec.files import read_json
from danlu.spec.problem import Problem, SpecError, problem_at, suggest_name
from danlu.storage.store.safe_path import UnsafePathError, sibling_file

SHARD_BYTES = 5_000_000_000
"""Bytes after which the next file is begun; a tensor is never split."""

TRAINABLE_DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
"""Dtypes of weights that can be trained, by their name in a safetensors header."""
_SAFETENSORS_NAMES = {dtype: name for name, dtype in TRAINABLE_DTYPES.items()}

_MAX_LISTED = 8  # of each kind of wrong tensor: the first few show what is wrong with all of them

OnProgress = Callable[[int, int], None]
"""Called with the bytes done and the total bytes."""


@dataclass(frozen=True)
class WeightEntry:
    """A tensor to write; its slices along the first dim are produced when they are written."""

    name: str
    shape: Sequence[int]
    dtype: torch.dtype
    iter_slices: Callable[[], Iterator[Tensor]]

    @property
    def bytes(self) -> int:
        """Bytes in the file."""
        return prod(self.shape) * self.dtype.itemsize


class SafetensorsReader:
    """Named tensors in the safetensors files of a folder; only requested data is read."""

    def __init__(self, folder: Path, stem: str) -> None:
        self.folder = folder
        self._files: dict[str, str] = {}
        self._handles: dict[str, Any] = {}
        index = folder / f"{stem}.safetensors.index.json"
        single = folder / f"{stem}.safetensors"
        if index.is_file():
            self._files = _weight_map(index)
        elif single.is_file():
            self._files = dict.fromkeys(self._open_file(single.name).keys(), single.name)
        else:
            message = f"has neither {index.name} nor {single.name}"
            raise SpecError([problem_at(folder, 1, "weights", message, "a folder that holds safetensors weights")])
        if absent := sorted({file for file in self._files.values() if not (folder / file).is_file()}):
            message = f"lacks {len(absent)} of the files its index names, the first is {absent[0]}"
            raise SpecError([problem_at(folder, 1, "weights", message, "complete the folder")])

    @property
    def names(self) -> list[str]:
        """Names of all tensors."""
        return list(self._files)

    @property
    def file_names(self) -> set[str]:
        """Names of the files that hold them."""
        return set(self._files.values())

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor."""
        return tuple(self._open_file(self._files[name]).get_slice(name).get_shape())

    def dtype(self, name: str) -> torch.dtype:
        """Dtype of a tensor; a dtype of quantized weights is an error."""
        stored = self._open_file(self._files[name]).get_slice(name).get_dtype()
        if stored not in TRAINABLE_DTYPES:
            message = f"is stored as {stored}, but must be one of {', '.join(TRAINABLE_DTYPES)}"
            path = self.folder / self._files[name]
            raise SpecError([problem_at(path, 1, name, message, "weights that are not quantized")])
        return TRAINABLE_DTYPES[stored]

    def read(self, name: str, offset: Sequence[int] | None = None, shape: Sequence[int] | None = None) -> Tensor:
        """A tensor, or the slice of it that begins at `offset` and has `shape`."""
        file = self._open_file(self._files[name])
        if offset is None or shape is None:
            tensor: Tensor = file.get_tensor(name)
            return tensor
        index = tuple(slice(first, first + size) for first, size in zip(offset, shape, strict=True))
        sliced: Tensor = file.get_slice(name)[index]
        return sliced

    def find_mismatches(
        self, expected: Mapping[str, Sequence[int]], ignored: Callable[[str], bool] = lambda name: False
    ) -> list[Problem]:
        """Tensors that are missing, unexpected or of another shape; `expected` maps names to shapes.

        Unexpected tensors whose name is `ignored` are not reported.
        """
        missing = [name for name in expected if name not in self._files]
        unexpected = [name for name in self._files if name not in expected and not ignored(name)]
        wrong = [name for name in expected if name in self._files and self.shape(name) != tuple(expected[name])]
        problems = [self._problem(name, "is missing", suggest_name(name, unexpected)) for name in missing[:_MAX_LISTED]]
        for name in unexpected[:_MAX_LISTED]:
            problems.append(self._problem(name, "is not a tensor of this model", suggest_name(name, list(expected))))
        for name in wrong[:_MAX_LISTED]:
            message = f"has shape {list(self.shape(name))}, but the model needs {list(expected[name])}"
            problems.append(self._problem(name, message, "weights of this model, or the model of these weights"))
        if len(problems) < (total := len(missing) + len(unexpected) + len(wrong)):
            problems.append(self._problem("weights", f"{total - len(problems)} more tensors are wrong", ""))
        return problems

    def _problem(self, name: str, message: str, suggestion: str) -> Problem:
        return problem_at(self.folder, 1, name, message, suggestion)

    def _open_file(self, file: str) -> Any:
        """An open file; kept open, because the next tensor is most often in the same one."""
        if file not in self._handles:
            try:
                self._handles[file] = safe_open(self.folder / file, framework="pt")
            except Exception as error:  # errors of the package and of the system: a truncated file, a pipe, no memory
                message = f"is not a safetensors file that can be read: {error}"
                raise SpecError([problem_at(self.folder / file, 1, "file", message, "get the file again")]) from None
        return self._handles[file]


def _weight_map(index: Path) -> dict[str, str]:
    """Map from tensors to files; all files are in the folder of the index."""
    values = read_json(index)
    files = values.get("weight_map") if isinstance(values, dict) else None
    if not isinstance(files, dict) or not files:
        message = "must map every tensor to its file, but does not"
        raise SpecError([problem_at(index, 1, "weight_map", message, "get the file again")])
    try:
        return {name: sibling_file(index, file).name for name, file in files.items()}
    except UnsafePathError as error:
        message, _, hint = str(error).removeprefix(f"{index} ").partition("; ")
        raise SpecError([problem_at(index, 1, "weight_map", message, hint)]) from None


def write_safetensors(
    folder: Path,
    stem: str,
    entries: Iterable[WeightEntry],
    on_progress: OnProgress = lambda done, total: None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write tensors into safetensors files and their index; only one slice is in memory at a time."""
    shards = _shards(list(entries), shard_bytes)
    total, done, files = sum(entry.bytes for shard in shards for entry in shard), 0, dict[str, str]()
    for number, shard in enumerate(shards, start=1):
        name = f"{stem}-{number:05d}-of-{len(shards):05d}.safetensors"
        with (folder / name).open("wb") as file:
            file.write(_header(shard))
            for entry in shard:
                for tensor_slice in entry.iter_slices():
                    written = file.write(_to_bytes(tensor_slice, entry.dtype))
                    done += written
                    on_progress(done, total)
                files[entry.name] = name
        size, wanted = (folder / name).stat().st_size, len(_header(shard)) + sum(entry.bytes for entry in shard)
        if size != wanted:
            raise RuntimeError(f"{folder / name} must have {wanted} bytes, but has {size}: slices do not fill a tensor")
    index = {"metadata": {"total_size": total}, "weight_map": files}
    (folder / f"{stem}.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", "utf-8")


def _shards(entries: list[WeightEntry], most: int) -> list[list[WeightEntry]]:
    shards: list[list[WeightEntry]] = [[]]
    held = 0
    for entry in entries:
        if shards[-1] and held + entry.bytes > most:
            shards.append([])
            held = 0
        shards[-1].append(entry)
        held += entry.bytes
    return shards


def _header(entries: list[WeightEntry]) -> bytes:
    """The header of a safetensors file: the length of a JSON text, and the text, padded to 8 bytes."""
    tensors: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for entry in entries:
        offsets = [position, position + entry.bytes]
        tensors[entry.name] = {
            "dtype": _SAFETENSORS_NAMES[entry.dtype],
            "shape": list(entry.shape),
            "data_offsets": offsets,
        }
        position += entry.bytes
    text = json.dumps(tensors, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _to_bytes(tensor_slice: Tensor, dtype: torch.dtype) -> bytes:
    """The bytes of a slice; via integers, because numpy has no bf16."""
    flat = tensor_slice.detach().to(dtype).contiguous().flatten()
    return flat.view(torch.uint8).numpy().tobytes()
