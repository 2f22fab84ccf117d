"""Interrupt collectives that wait for a dead or stuck rank, from another thread.

Gloo has no abort that ends a wait; but a wait ends with an error as soon as its connection does. So the connections are
shut down, those of this process alone: the other ranks are interrupted by their own.
"""

import os
import socket

from danlu.comm.own_sockets import own_sockets

_FAMILIES = (socket.AF_INET, socket.AF_INET6)


def shut_connections(kept: frozenset[str]) -> int:
    """Shut down every TCP connection of this process but the kept ones, and none that listens; how many there were."""
    shut = 0
    for descriptor, inode in own_sockets().items():
        if inode in kept:
            continue
        try:
            with socket.socket(fileno=os.dup(descriptor)) as found:
                listens = found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
                if found.family in _FAMILIES and found.type == socket.SOCK_STREAM and not listens:
                    found.shutdown(socket.SHUT_RDWR)
                    shut += 1
        except OSError:  # closed meanwhile, or not connected
            continue
    return shut
