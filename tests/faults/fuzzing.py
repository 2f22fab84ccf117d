"""Manifests, nodes and leaves as a damaged disk or a stranger might have written them, and a reader that is watched.

Most changes are made with knowledge of the format, and the hashes above them are then made right again, so that what
is read gets past them and deep into the reader.
"""

import errno
import hashlib
import json
import os
import random
import resource
import stat
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from made_checkpoints import attempt_of, content, write_all

from danlu.storage.checkpoint.checkpoint_dir import CheckpointDir
from danlu.storage.checkpoint.commit import step_folder
from danlu.storage.checkpoint.manifest import MANIFEST_FILE, CorruptCheckpointError
from danlu.storage.checkpoint.reader import CheckpointReader, hash_only
from danlu.storage.store.local_store import LocalStore
from danlu.storage.store.memory_store import MemoryStore
from danlu.storage.store.syscalls import Syscalls

STEP = 10
FOLDER = step_folder(STEP)
LONGEST = 2.0
"""Seconds of processor time one input may take; about a thousand times the usual."""
ODD: tuple[Any, ...] = (
    0, 1, -1, 2**31, 2**32, 2**62, 2**63, 2**64, 10**30, 0.5, 1e308, True, False, None, "", "x", [], {}, [[]], "0" * 64,
    "../../etc/passwd", "/etc/passwd", "..", "manifest.json", "00000000-000000.pack", "0000000z-000000.json",
    "00000000-000000.json\n", "\ud7ff\0", "é" * 300, [2**62] * 16, [0] * 17, [-1], [1, 1], "danlu leaf", "danlu node",
    "danlu checkpoint", "I8", "F64", 8, 9,
)  # fmt: skip


_TOKENS = (b"[" * 5000, b"9" * 5000, b'{"a":' * 500, b"\xff\xfe", b"NaN", b"1e999", b"-0", b"null", b'"', b"\\u0000")


class Outside(AssertionError):  # noqa: N818 - it is where a path led
    """A path was opened that is not in the store's folder."""


class Fenced(Syscalls):
    """A folder in memory for a real `LocalStore`; refuses any path outside it, and remembers that it was asked."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.files: dict[str, bytes] = {}
        self.outside: list[str] = []
        self._open: dict[int, bytes] = {}
        self._numbers = count(3)

    def open(self, path: str, flags: int, mode: int = 0o666) -> int:
        self._hold(path)
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            raise Outside(f"a reader must not write, but opens {path}")
        if path not in self.files:
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", path)
        number = next(self._numbers)
        self._open[number] = self.files[path]
        return number

    def close(self, descriptor: int) -> None:
        del self._open[descriptor]

    def preadv(self, descriptor: int, into: Sequence[memoryview], offset: int) -> int:
        content = self._open[descriptor][offset : offset + len(into[0])]
        into[0][: len(content)] = content
        return len(content)

    def fstat(self, descriptor: int) -> os.stat_result:
        return os.stat_result((stat.S_IFREG, 0, 0, 1, 0, 0, len(self._open[descriptor]), 0, 0, 0))

    def listdir(self, path: str) -> list[str]:
        self._hold(path)
        return sorted({name[len(path) + 1 :].split("/")[0] for name in self.files if name.startswith(f"{path}/")})

    def realpath(self, path: str) -> str:
        return os.path.normpath(path)

    def _hold(self, path: str) -> None:
        if not f"{os.path.normpath(path)}/".startswith(f"{self.folder}/"):
            self.outside.append(path)
            raise Outside(f"{path} must lie in {self.folder}")


@dataclass
class Fuzzed:
    """What came of many inputs."""

    inputs: int = 0
    accepted: int = 0
    """Read to the end: the change does not matter to what is loaded, or made another checkpoint that is whole."""
    refused: int = 0
    slowest: float = 0.0
    outside: int = 0
    other: dict[str, str] = field(default_factory=dict)
    """Errors that are not `CorruptCheckpointError`, by kind, each with the input that showed it first."""


def valid(writers: int) -> dict[str, bytes]:
    """The files of a checkpoint that is right."""
    store = MemoryStore("fuzz")
    write_all(store, STEP, attempt_of(7), content(STEP, attempt_of(7), rows=max(4, writers), columns=2), writers)
    return {name: store.read(f"{FOLDER}/{name}") for name in store.list(FOLDER)}


def read_back(store: LocalStore | MemoryStore) -> bool:
    """What every reader does, to the end; whether it was accepted. Raises what is not `CorruptCheckpointError`."""
    listed = CheckpointDir(store, 2).resumable_steps()
    try:
        reader = CheckpointReader(store, STEP)
        reader.read_chunks(reader.find_chunks(), hash_only)
        whole = {name: tensor.shape for name, tensor in reader.manifest.tensors.items()}
        reader.find_chunks({name: [((0,) * len(shape), (1,) * len(shape))] for name, shape in whole.items()})
    except (CorruptCheckpointError, FileNotFoundError):
        return False
    return listed == [STEP] or not reader.manifest.finite


class Target:
    """One checkpoint whose files are replaced by each input and put back afterwards."""

    def __init__(self, writers: int) -> None:
        self.files = valid(writers)
        self.calls = Fenced("/store/run")
        self.store = LocalStore(Path(self.calls.folder), self.calls)
        self._put(self.files)

    def _put(self, files: Mapping[str, bytes]) -> None:
        self.calls.files = {f"{self.calls.folder}/{FOLDER}/{name}": text for name, text in files.items()}

    def try_one(self, changed: Mapping[str, bytes], told: Fuzzed) -> None:
        """Read with these files in place of the right ones."""
        self._put({**self.files, **changed})
        began = time.process_time()
        try:
            accepted = read_back(self.store)
            told.accepted += accepted
            told.refused += not accepted
        except Exception as error:
            kind = f"{type(error).__name__}: {str(error)[:60]}"
            told.other.setdefault(kind, repr({name: text[:2000] for name, text in changed.items()}))
        finally:
            told.slowest = max(told.slowest, time.process_time() - began)
            told.inputs += 1
            told.outside = len(self.calls.outside)


def fuzz(inputs: int, seed: int, writers: int = 2, on_input: Callable[[], None] = lambda: None) -> Fuzzed:
    """Try so many inputs."""
    target, told, draw = Target(writers), Fuzzed(), random.Random(seed)
    while told.inputs < inputs:
        target.try_one(mutated(target.files, draw), told)
        on_input()
    return told


def memory_limit(more: int) -> None:
    """From here on this process may take so many more bytes of address space, and no others."""
    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + more, now + more))


# --- changes


def mutated(files: Mapping[str, bytes], draw: random.Random) -> dict[str, bytes]:
    """One to three changes to one text; hashes above it made right again, mostly."""
    texts = [name for name in files if name.endswith(".json")]
    name = draw.choice([*texts, MANIFEST_FILE])
    text = files[name]
    if draw.random() < 0.25:
        text = raw_change(text, draw)
    else:
        value = json.loads(text)
        for _ in range(draw.randint(1, 3)):
            change(value, draw)
        text = _dumped(value)
    changed = {name: text}
    return changed if draw.random() < 0.2 else resealed({**files, **changed}, changed)


def change(value: Any, draw: random.Random) -> None:
    """Change one thing somewhere in a JSON value, in place."""
    holders: list[Any] = []
    _holders(value, holders)
    holder = draw.choice(holders)
    keys = list(holder) if isinstance(holder, dict) else list(range(len(holder)))
    if not keys:
        return
    key = draw.choice(keys)
    match draw.randrange(6):
        case 0:
            del holder[key]
        case 1:
            holder[key] = _copied(draw.choice(ODD))
        case 2 if isinstance(holder, list):
            holder.extend([_copied(holder[key])] * draw.choice((1, 2, 70)))
        case 2:
            holder[draw.choice(("surprise", "weight", "bias", "step", "x" * 5000))] = _copied(holder[key])
        case 3 if isinstance(holder[key], int) and not isinstance(holder[key], bool):
            holder[key] += draw.choice((-1, 1, -8, 64, 2**20, 2**40, 2**61))
        case 4:
            other = draw.choice(holders)
            more = list(other) if isinstance(other, dict) else list(range(len(other)))
            if more:
                holder[key] = _copied(other[draw.choice(more)])
        case _ if isinstance(holder[key], str) and holder[key]:
            at = draw.randrange(len(holder[key]))
            holder[key] = holder[key][:at] + draw.choice("0f9zn-./\\\0é\n") + holder[key][at + 1 :]


def raw_change(text: bytes, draw: random.Random) -> bytes:
    """Bytes changed without regard to what they mean."""
    whole = bytearray(text)
    for _ in range(draw.randint(1, 4)):
        at = draw.randrange(len(whole) + 1)
        match draw.randrange(6):
            case 0 if at < len(whole):
                whole[at] ^= 1 << draw.randrange(8)
            case 1:
                del whole[at : at + draw.randint(1, 40)]
            case 2:
                whole[at:at] = draw.randbytes(draw.randint(1, 8))
            case 3:
                whole[at:at] = draw.choice(_TOKENS)
            case 4:
                start = draw.randrange(len(whole) + 1)
                whole[at:at] = whole[start : start + draw.randint(1, 200)]
            case _:
                del whole[at:]
    return bytes(whole)


def resealed(files: Mapping[str, bytes], changed: Mapping[str, bytes]) -> dict[str, bytes]:
    """The changed files, and those above them with lengths and hashes as if nothing had been changed."""
    result = dict(changed)
    nodes = sorted(name for name in files if "-n" in name)  # level 1 before level 2
    for name in [*nodes, MANIFEST_FILE]:
        try:
            node = json.loads(result.get(name, files[name]))
            for child in node["children"]:
                text = result.get(child["file"])
                if text is not None:
                    child["bytes"], child["sha256"] = len(text), hashlib.sha256(text).hexdigest()
            text = _dumped(node)
            if name == MANIFEST_FILE:
                node["root"] = "0" * 64
                blank = _dumped(node)
                text = blank.replace(b"0" * 64, hashlib.sha256(blank).hexdigest().encode(), 1)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            continue  # it is too broken to be made right
        if text != files[name]:
            result[name] = text
    return result


def _holders(value: Any, found: list[Any]) -> None:
    if isinstance(value, dict | list):
        found.append(value)
        for inner in value.values() if isinstance(value, dict) else value:
            _holders(inner, found)


def _copied(value: Any) -> Any:
    """The same once more: what is in two places must not change in both, or come to hold itself."""
    return json.loads(_dumped(value))


def _dumped(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode("utf-8", "surrogatepass")
