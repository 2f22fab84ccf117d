"""Did a collective fail because another rank is gone, or because of something in this process?"""

import torch.distributed as dist

from danlu.comm.shared_memory import HostPeerError
from danlu.comm.store_client import StoreError
from danlu.comm.world import JoinCanceledError

_GLOO_WORDS = ("gloo/", "Connection closed by peer", "Connection reset by peer", "Broken pipe")
"""Gloo raises plain `RuntimeError`s, with the place in its source."""


def is_peer_failure(error: BaseException | None) -> bool:
    """Whether an error, or what caused it, is of a broken connection to other ranks."""
    while error is not None:
        if isinstance(error, JoinCanceledError | HostPeerError | StoreError | dist.DistError):
            return True
        if isinstance(error, RuntimeError) and any(words in str(error) for words in _GLOO_WORDS):
            return True
        error = error.__cause__ or error.__context__
    return False
