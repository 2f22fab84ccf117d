"""Weights in safetensors files: written one piece at a time, read one slice at a time.

A folder holds `<stem>-00001-of-0000N.safetensors` and an index that says which file holds which tensor, the form in
which Hugging Face models are published; a single `<stem>.safetensors` without an index is read too.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from danlu.spec.problem import Problem, SpecError, nearest, problem_at

SHARD_BYTES = 5_000_000_000
"""Bytes after which the next file is begun; a tensor is never cut."""

DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
"""Dtypes of weights that can be trained from, by their name in a safetensors header."""
_NAMES = {dtype: name for name, dtype in DTYPES.items()}

_TOLD = 8  # of each kind of wrong tensor: the first few tell what is wrong with all of them

OnProgress = Callable[[int, int], None]
"""Told how many bytes are done, and how many there are."""


@dataclass(frozen=True)
class Entry:
    """A tensor to be written; its pieces, joined along the first dim, are asked for when their turn comes."""

    name: str
    shape: Sequence[int]
    dtype: torch.dtype
    pieces: Callable[[], Iterator[Tensor]]

    @property
    def bytes(self) -> int:
        """Bytes in the file."""
        return prod(self.shape) * self.dtype.itemsize


class Weights:
    """Named tensors in the safetensors files of a folder; only what is asked for is read."""

    def __init__(self, folder: Path, stem: str) -> None:
        self.folder = folder
        self._open = _safe_open()
        self._handles: dict[str, Any] = {}
        index = folder / f"{stem}.safetensors.index.json"
        single = folder / f"{stem}.safetensors"
        if index.is_file():
            self._files: dict[str, str] = json.loads(index.read_text("utf-8"))["weight_map"]
        elif single.is_file():
            self._files = dict.fromkeys(self._handle(single.name).keys(), single.name)
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

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor."""
        return tuple(self._handle(self._files[name]).get_slice(name).get_shape())

    def dtype(self, name: str) -> torch.dtype:
        """Dtype of a tensor; a dtype of quantised weights is an error."""
        stored = self._handle(self._files[name]).get_slice(name).get_dtype()
        if stored not in DTYPES:
            message = f"is stored as {stored}, but must be one of {', '.join(DTYPES)}"
            path = self.folder / self._files[name]
            raise SpecError([problem_at(path, 1, name, message, "weights that are not quantised")])
        return DTYPES[stored]

    def read(self, name: str, offset: Sequence[int] | None = None, shape: Sequence[int] | None = None) -> Tensor:
        """A tensor, or the part of it that begins at `offset` and has `shape`."""
        file = self._handle(self._files[name])
        if offset is None or shape is None:
            whole: Tensor = file.get_tensor(name)
            return whole
        place = tuple(slice(first, first + size) for first, size in zip(offset, shape, strict=True))
        part: Tensor = file.get_slice(name)[place]
        return part

    def differences(
        self, expected: Mapping[str, Sequence[int]], ignored: Callable[[str], bool] = lambda name: False
    ) -> list[Problem]:
        """What is missing, unexpected or of another shape, where `expected` says the shape of every name.

        An unexpected tensor whose name is `ignored` is none.
        """
        missing = [name for name in expected if name not in self._files]
        unexpected = [name for name in self._files if name not in expected and not ignored(name)]
        wrong = [name for name in expected if name in self._files and self.shape(name) != tuple(expected[name])]
        problems = [self._problem(name, "is missing", nearest(name, unexpected)) for name in missing[:_TOLD]]
        for name in unexpected[:_TOLD]:
            problems.append(self._problem(name, "is not a tensor of this model", nearest(name, list(expected))))
        for name in wrong[:_TOLD]:
            message = f"has shape {list(self.shape(name))}, but the model needs {list(expected[name])}"
            problems.append(self._problem(name, message, "weights of this model, or the model of these weights"))
        if len(problems) < (total := len(missing) + len(unexpected) + len(wrong)):
            problems.append(self._problem("weights", f"{total - len(problems)} more tensors are wrong", ""))
        return problems

    def _problem(self, name: str, message: str, suggestion: str) -> Problem:
        return problem_at(self.folder, 1, name, message, suggestion)

    def _handle(self, file: str) -> Any:
        """An open file; it stays open, because the next tensor is most often in the same one."""
        if file not in self._handles:
            self._handles[file] = self._open(self.folder / file, framework="pt")
        return self._handles[file]


def write_weights(
    folder: Path,
    stem: str,
    entries: Iterable[Entry],
    on_progress: OnProgress = lambda done, total: None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write tensors into safetensors files and their index; no more than one piece is in memory at a time."""
    shards = _shards(list(entries), shard_bytes)
    total, done, files = sum(entry.bytes for shard in shards for entry in shard), 0, dict[str, str]()
    for number, shard in enumerate(shards, start=1):
        name = f"{stem}-{number:05d}-of-{len(shards):05d}.safetensors"
        with (folder / name).open("wb") as file:
            file.write(_header(shard))
            for entry in shard:
                for piece in entry.pieces():
                    written = file.write(_raw(piece, entry.dtype))
                    done += written
                    on_progress(done, total)
                files[entry.name] = name
        size, wanted = (folder / name).stat().st_size, len(_header(shard)) + sum(entry.bytes for entry in shard)
        if size != wanted:
            raise RuntimeError(f"{folder / name} must have {wanted} bytes, but has {size}: pieces do not fill a tensor")
    index = {"metadata": {"total_size": total}, "weight_map": files}
    (folder / f"{stem}.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", "utf-8")


def _shards(entries: list[Entry], most: int) -> list[list[Entry]]:
    shards: list[list[Entry]] = [[]]
    held = 0
    for entry in entries:
        if shards[-1] and held + entry.bytes > most:
            shards.append([])
            held = 0
        shards[-1].append(entry)
        held += entry.bytes
    return shards


def _header(entries: list[Entry]) -> bytes:
    """The beginning of a safetensors file: the length of a JSON text, and the text, padded to 8 bytes."""
    tensors: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for entry in entries:
        place = [position, position + entry.bytes]
        tensors[entry.name] = {"dtype": _NAMES[entry.dtype], "shape": list(entry.shape), "data_offsets": place}
        position += entry.bytes
    text = json.dumps(tensors, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _raw(piece: Tensor, dtype: torch.dtype) -> bytes:
    """The bytes of a piece; numpy has no bf16, so they go through integers."""
    flat = piece.detach().to(dtype).contiguous().flatten()
    return flat.view(torch.uint8).numpy().tobytes()


def _safe_open() -> Any:
    try:
        from safetensors import safe_open
    except ImportError:
        message = "is not installed, and weights are read with it"
        raise SpecError([problem_at(Path("safetensors"), 1, "package", message, "pip install 'danlu[hf]'")]) from None
    return safe_open
