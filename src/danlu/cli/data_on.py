"""`danlu data build --on ray`: where a build tokenises."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from typing import Annotated

import typer

from danlu.storage.packing import Encode, pack_here
from danlu.storage.tokenizer import Tokenizer


class Builder(StrEnum):
    """Where a build tokenises; the bytes are the same."""

    HERE = "here"
    RAY = "ray"


On = Annotated[Builder, typer.Option("--on", help="Tokenise in this process, or on the machines of a Ray cluster.")]
Address = Annotated[
    str | None,
    typer.Option(metavar="HOST:PORT", help="Ray cluster to join; one on this machine alone is started if left out."),
]

_NO_REPORTS = {"RAY_USAGE_STATS_ENABLED": "0"}
"""Ray would tell its makers what it is used for."""
_ONE_MACHINE = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
"""A Ray that may not form clusters listens on loopback alone, on any system."""


@contextmanager
def encoding(tokenizer: Tokenizer, on: Builder, address: str | None) -> Iterator[Encode]:
    """How a build tokenises, for as long as it lasts."""
    if on is Builder.HERE:
        if address is not None:
            raise typer.BadParameter("is for --on ray", param_hint="--address")
        yield pack_here(tokenizer)
        return
    alone = address is None or address.startswith(("127.", "localhost:"))
    os.environ.update(_NO_REPORTS | (_ONE_MACHINE if alone else {}))  # Ray reads them as it is imported
    from danlu.storage.ray_build import pack_on_ray, ray_cluster

    with ray_cluster(address):
        yield pack_on_ray(tokenizer)
