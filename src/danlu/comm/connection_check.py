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
_IPV4_IN_IPV6, _ANY = "0000000000000000FFFF0000", "00000000"


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
    listening = {socket.local for socket in sockets if socket.state == _LISTENING and socket.inode in own}
    ends = {(socket.local, socket.remote) for socket in sockets if socket.state == _ESTABLISHED}
    return {
        socket.uid
        for socket in sockets
        if socket.state == _ESTABLISHED
        and socket.uid != os.geteuid()
        and not listening.isdisjoint({socket.remote, socket.remote._replace(address=_ANY)})
        and (socket.remote, socket.local) in ends  # the other end is here, not at the same port of another host
    }


class _End(NamedTuple):
    """Of a connection, as the kernel writes it."""

    address: str
    port: str


class _Socket(NamedTuple):
    local: _End
    remote: _End
    state: str
    uid: int
    inode: str


def _sockets() -> Iterator[_Socket]:
    """All TCP sockets of this host's network namespace."""
    for table in (Path("/proc/net/tcp"), Path("/proc/net/tcp6")):
        if table.exists():
            for line in table.read_text().splitlines()[1:]:
                fields = line.split()
                local, remote = map(_end, fields[1:3])
                yield _Socket(local, remote, fields[3], int(fields[7]), fields[9])


def _end(text: str) -> _End:
    """The end of a connection; an IPv4 address is the same in both tables, and so is any address."""
    address, _, port = text.rpartition(":")
    address = address.removeprefix(_IPV4_IN_IPV6)
    return _End(_ANY if not address.strip("0") else address, port)
