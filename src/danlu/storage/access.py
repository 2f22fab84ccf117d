"""The umask of a run: only its owner reads what it writes, unless the recipe says otherwise. No torch."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

from danlu.spec.recipe import Access

_UMASK: dict[Access, int] = {"owner": 0o077, "group": 0o027, "everyone": 0o022}
"""Permissions that new files and folders do not get; only the owner ever writes."""


def set_umask(access: Access) -> None:
    """From now on this process and its children create files and folders for these readers."""
    os.umask(_UMASK[access])


@contextmanager
def restore_umask() -> Iterator[None]:
    """Give a process that is not ours alone its own umask back at the end."""
    before = os.umask(0o077)
    os.umask(before)
    try:
        yield
    finally:
        os.umask(before)
