"""`danlu data build --on ray`: where a build tokenizes."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from typing import Annotated

import typer

from danlu.storage.data.tokenization import TokenizeFn, local_tokenize_fn
from danlu.storage.data.tokenizer import Tokenizer


class BuildExecutor(StrEnum):
    """Where a build tokenizes; the bytes are the same."""

    HERE = "here"
    RAY = "ray"


ExecutorOption = Annotated[BuildExecutor, typer.Option("--on", help="Tokenize in this process, or on a Ray cluster.")]
RayAddressOption = Annotated[
    str | None,
    typer.Option(metavar="HOST:PORT", help="Ray cluster to use; default: start one on this machine."),
]

_NO_USAGE_STATS = {"RAY_USAGE_STATS_ENABLED": "0"}
"""Turns off Ray's usage reports."""
_LOOPBACK_ONLY = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
"""A Ray that may not form clusters listens on loopback only, on any system."""


@contextmanager
def open_tokenize_fn(tokenizer: Tokenizer, on: BuildExecutor, address: str | None) -> Iterator[TokenizeFn]:
    """The tokenize function of a build, valid within the context."""
    if on is BuildExecutor.HERE:
        if address is not None:
            raise typer.BadParameter("is for --on ray", param_hint="--address")
        yield local_tokenize_fn(tokenizer)
        return
    alone = address is None or address.startswith(("127.", "localhost:"))
    os.environ.update(_NO_USAGE_STATS | (_LOOPBACK_ONLY if alone else {}))  # Ray reads them when it is imported
    from danlu.storage.data.ray_tokenization import ray_cluster, ray_tokenize_fn

    with ray_cluster(address):
        yield ray_tokenize_fn(tokenizer)
