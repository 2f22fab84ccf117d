"""Detect other users of this host that are connected to this process: gloo does not authenticate peers.

Any process that claims to be pair 3 while the ranks connect is accepted as pair 3. So ranks that share a host check,
before anything is sent and again before the first step, in the kernel's socket tables whether a socket of another user
is connected to a port they listen on. No pairs are created later, and data sent to those ports then has no effect. No
torch.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from danlu.comm.own_sockets import own_sockets

_ESTABLISHED, _LISTENING = "01", "0A"


class UnauthorizedConnectionError(RuntimeError):
    """Another user is connected to this run."""


def check_connections() -> None:
    """Raise `UnauthorizedConnectionError` if another user of this host is connected to a port of this process."""
    if error := unauthorized_connection_error():
        raise error


def unauthorized_connection_error() -> UnauthorizedConnectionError | None:
    """The error for connected sockets of other users; None if there are none."""
    users = ", ".join(str(uid) for uid in sorted(unauthorized_uids()))
    if not users:
        return None
    return UnauthorizedConnectionError(
        f"every connection to this run must be its owner's (uid {os.geteuid()}), but some are of uid {users}; "
        "another user connected to this run's ports: stop that process and restart"
    )


def unauthorized_uids() -> set[int]:
    """Ids of other users of this host that are connected to ports on which this process listens."""
    sockets = list(_sockets())
    own = set(own_sockets().values())
    ports = {socket.local for socket in sockets if socket.state == _LISTENING and socket.inode in own}
    return {
        socket.uid
        for socket in sockets
        if socket.state == _ESTABLISHED and socket.remote in ports and socket.uid != os.geteuid()
    }


class _Socket(NamedTuple):
    local: str
    remote: str
    """Port, as the kernel writes it."""
    state: str
    uid: int
    inode: str


def _sockets() -> Iterator[_Socket]:
    """All TCP sockets of this host's network namespace."""
    for table in (Path("/proc/net/tcp"), Path("/proc/net/tcp6")):
        if table.exists():
            for line in table.read_text().splitlines()[1:]:
                fields = line.split()
                local, remote = (address.rpartition(":")[2] for address in fields[1:3])
                yield _Socket(local, remote, fields[3], int(fields[7]), fields[9])
