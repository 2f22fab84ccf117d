"""Builds on a Ray cluster: its machines read and tokenise, this process writes; the bytes are those of a build here."""

import json
import logging
import socket
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache, partial
from itertools import islice
from pathlib import Path
from typing import Any

from danlu.spec import SpecError
from danlu.spec.problem import problem_at
from danlu.storage.packing import Encode, Packed
from danlu.storage.pieces import Joined, Row, Stretch, cut, pack_piece
from danlu.storage.source import Documents
from danlu.storage.tokenizer import PortableTokenizer, Tokenizer

_PIECES_AT_ONCE = 1024
"""Pieces given to Ray in one go: it keeps a note of each, and a corpus may have millions."""

_PATIENCE = 10.0
_STARTS = 3

_ONE_THREAD = {"env_vars": {"RAYON_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}}
"""Ray starts a worker a core: one that used all cores itself would only get in the way of the others."""


@contextmanager
def ray_cluster(address: str | None) -> Iterator[None]:
    """Join the Ray cluster at `address`, or have one on this machine for the time being."""
    ray = _ray()
    if address is not None:
        _reach(address)
    with tempfile.TemporaryDirectory(prefix="danlu-ray-") as folder:
        _init(ray, address, folder)
        try:
            yield
        finally:
            ray.shutdown()


def _init(ray: Any, address: str | None, folder: str) -> None:
    here = {"include_dashboard": False, "_temp_dir": folder} if address is None else {}
    settings = {"log_to_driver": False, "logging_level": logging.ERROR, "runtime_env": _ONE_THREAD} | here
    for left in reversed(range(_STARTS if address is None else 1)):
        try:
            ray.init(address=address or "local", **settings)
            return
        except Exception as error:  # Ray raises bare Exception where a node does not start within its half minute
            ray.shutdown()
            if not left:
                raise _cannot_join(address or "a Ray of this machine", _first_line(error)) from None
            message = f"Ray did not start on this machine: {_first_line(error)}; trying {left} times more"
            warnings.warn(message, RuntimeWarning, stacklevel=4)


def _reach(address: str) -> None:
    """Raise if nobody answers at the address; Ray itself would try for minutes."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise _cannot_join(address, "is not HOST:PORT")
    try:
        socket.create_connection((host, int(port)), _PATIENCE).close()
    except (OSError, OverflowError) as error:
        raise _cannot_join(address, str(error)) from None


def _cannot_join(address: str, why: str) -> SpecError:
    hint = "see `ray status` on a machine of the cluster; Ray and Python must be of one version on all of them"
    return SpecError([problem_at(Path(address), 1, "ray", f"cannot be joined: {why}", hint)])


def pack_on_ray(tokenizer: Tokenizer, piece_bytes: int | None = None) -> Encode:
    """Tokenise on the machines of the cluster that this process is in; for `build(encode=…)`."""

    def encode(documents: Documents) -> Iterator[Packed]:
        joined = Joined(documents, tokenizer)
        pieces = cut(documents, piece_bytes)
        exceptions = _ray().exceptions
        try:
            while some := list(islice(pieces, _PIECES_AT_ONCE)):
                for row in _rows(some, documents.field, tokenizer):
                    yield from joined.groups(row)
        except (exceptions.RayError, exceptions.RayTaskError) as error:
            message = f"failed: {_first_line(error)}"
            hint = "start the build again when the cluster is well: it goes on behind the last shard it noted"
            raise SpecError([problem_at(Path("ray"), 1, "ray", message, hint)]) from error
        documents.done = documents.bytes

    return encode


def _rows(pieces: list[list[Stretch]], field: str, tokenizer: Tokenizer) -> Iterator[Row]:
    """The rows of these pieces, in their order, as they are ready."""
    import ray.data

    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False  # there is one of ours
    context.execution_options.preserve_order = True
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    items = [{"piece": json.dumps(piece)} for piece in pieces]
    work = partial(_packed, field=field, tokenizer=tokenizer.portable)
    # One piece a task; a task's rows come back as they are made, so that no machine holds a whole piece in tokens.
    made = ray.data.from_items(items, override_num_blocks=len(items)).map_batches(work, batch_size=1)
    yield from made.iter_rows()


def _packed(batch: dict[str, Any], *, field: str, tokenizer: PortableTokenizer) -> Iterator[dict[str, list[Any]]]:
    """On a worker: the rows of a batch of one piece."""
    for text in batch["piece"]:
        piece = [Stretch(*stretch) for stretch in json.loads(text)]
        for row in pack_piece(piece, field, _opened(tokenizer)):
            yield {name: [value] for name, value in row.items()}


@lru_cache(maxsize=1)
def _opened(tokenizer: PortableTokenizer) -> Tokenizer:
    """Opened once a worker: to read a large vocabulary takes a second."""
    return tokenizer.open()


def _ray() -> Any:
    try:
        import ray
        import ray.data
    except ImportError as error:
        message = f"needs Ray Data, which cannot be imported ({error})"
        raise SpecError([problem_at(Path("--on ray"), 1, "ray", message, "pip install 'danlu[data]'")]) from None
    return ray


def _first_line(error: BaseException) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[-1].strip() if lines else type(error).__name__
