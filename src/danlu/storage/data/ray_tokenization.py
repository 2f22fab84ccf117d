"""Builds on a Ray cluster: its nodes read and tokenize, this process writes; the bytes are those of a local build."""

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
from danlu.storage.data.document_reader import DocumentFormat
from danlu.storage.data.documents import DocumentStream
from danlu.storage.data.input_splits import FileSplit, Row, SplitMerger, make_splits, tokenize_split
from danlu.storage.data.tokenization import TokenizedBatch, TokenizeFn
from danlu.storage.data.tokenizer import SerializedTokenizer, Tokenizer

_SPLITS_PER_SUBMISSION = 1024
"""Splits submitted to Ray at once: it keeps metadata of each, and a corpus may have millions."""

_CONNECT_TIMEOUT = 10.0
_START_ATTEMPTS = 3

_ONE_THREAD = {"env_vars": {"RAYON_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}}
"""Ray starts one worker per core: one that used all cores would only slow down the others."""


@contextmanager
def ray_cluster(address: str | None) -> Iterator[None]:
    """Connect to the Ray cluster at `address`, or start one on this machine for the duration of the context."""
    ray = _import_ray()
    if address is not None:
        _check_reachable(address)
    with tempfile.TemporaryDirectory(prefix="danlu-ray-") as folder:
        _init(ray, address, folder)
        try:
            yield
        finally:
            ray.shutdown()


def _init(ray: Any, address: str | None, folder: str) -> None:
    here = {"include_dashboard": False, "_temp_dir": folder} if address is None else {}
    settings = {"log_to_driver": False, "logging_level": logging.ERROR, "runtime_env": _ONE_THREAD} | here
    for left in reversed(range(_START_ATTEMPTS if address is None else 1)):
        try:
            ray.init(address=address or "local", **settings)
            return
        except Exception as error:  # Ray raises bare Exception if a node does not start within 30 s
            ray.shutdown()
            if not left:
                raise _connect_error(address or "a local Ray", _last_line(error)) from None
            message = f"Ray did not start on this machine: {_last_line(error)}; {left} retries left"
            warnings.warn(message, RuntimeWarning, stacklevel=4)


def _check_reachable(address: str) -> None:
    """Raise if the address does not accept connections; Ray itself would retry for minutes."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise _connect_error(address, "is not HOST:PORT")
    try:
        socket.create_connection((host, int(port)), _CONNECT_TIMEOUT).close()
    except (OSError, OverflowError) as error:
        raise _connect_error(address, str(error)) from None


def _connect_error(address: str, why: str) -> SpecError:
    hint = "see `ray status` on a node of the cluster; all nodes must have the same version of Ray and of Python"
    return SpecError([problem_at(Path(address), 1, "ray", f"cannot be reached: {why}", hint)])


def ray_tokenize_fn(tokenizer: Tokenizer) -> TokenizeFn:
    """Tokenize on the cluster that this process is connected to; for `build_dataset(encode=…)`."""

    def encode(documents: DocumentStream) -> Iterator[TokenizedBatch]:
        merger = SplitMerger(documents, tokenizer)
        splits = make_splits(documents)
        exceptions = _import_ray().exceptions
        try:
            while batch := list(islice(splits, _SPLITS_PER_SUBMISSION)):
                for row in _rows(batch, documents.form, tokenizer):
                    yield from merger.merge(row)
        except (exceptions.RayError, exceptions.RayTaskError) as error:
            message = f"failed: {_last_line(error)}"
            hint = "rerun the build when the cluster is healthy; it resumes after the last recorded shard"
            raise SpecError([problem_at(Path("ray"), 1, "ray", message, hint)]) from error
        documents.bytes_done = documents.total_bytes

    return encode


def _rows(splits: list[list[FileSplit]], form: DocumentFormat, tokenizer: Tokenizer) -> Iterator[Row]:
    """The rows of these splits, in order, as they become ready."""
    import ray.data

    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False  # we show our own
    context.execution_options.preserve_order = True
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    items = [{"split": json.dumps(split)} for split in splits]
    tokenize = partial(_tokenize_splits, form=form, tokenizer=tokenizer.serialized)
    # One split per task; a task's rows are returned as they are made, so that no node holds all tokens of a split.
    rows = ray.data.from_items(items, override_num_blocks=len(items)).map_batches(tokenize, batch_size=1)
    yield from rows.iter_rows()


def _tokenize_splits(
    batch: dict[str, Any], *, form: DocumentFormat, tokenizer: SerializedTokenizer
) -> Iterator[dict[str, list[Any]]]:
    """On a worker: the rows of a batch of one split."""
    for text in batch["split"]:
        split = [FileSplit(*file_split) for file_split in json.loads(text)]
        for row in tokenize_split(split, form, _load_tokenizer(tokenizer)):
            yield {name: [value] for name, value in row.items()}


@lru_cache(maxsize=1)
def _load_tokenizer(tokenizer: SerializedTokenizer) -> Tokenizer:
    """Loaded once per worker: a large vocabulary takes a second to read."""
    return tokenizer.load()


def _import_ray() -> Any:
    try:
        import ray
        import ray.data
    except ImportError as error:
        message = f"needs Ray Data, which cannot be imported ({error})"
        raise SpecError([problem_at(Path("--on ray"), 1, "ray", message, "pip install 'danlu[data]'")]) from None
    return ray


def _last_line(error: BaseException) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[-1].strip() if lines else type(error).__name__
