"""Where the ranks of a run find each other."""

import socket
import warnings
from dataclasses import dataclass, field
from datetime import timedelta
from ipaddress import ip_address

from danlu.comm.store_server import StoreServer
from danlu.comm.token_store import TokenStore
from danlu.spec.resilience import TlsFiles
from danlu.torch_compat import FileStore, HashStore, Store

FILE_SCHEME = "file:"
"""Prefix of a rendezvous endpoint that is a file."""

TIMEOUT = timedelta(minutes=10)
"""How long a rank waits for the others, in the store and in a collective of any group."""


@dataclass(frozen=True)
class RankInfo:
    """Rank, world size, local rank and rendezvous endpoint of one process."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    endpoint: str = ""
    """`host:port` of the store that rank 0 opens, or `file:PATH` if all ranks are on one host: file permissions protect
    that file, while any user of the host can connect to a port. Not needed by a run of one rank."""
    token: bytes = field(default=b"", repr=False)
    """What every rank must know to use a store at `host:port`: see `danlu.comm.store_token`."""

    is_served: bool = False
    """Whether somebody else serves the store at `host:port`, so that rank 0 does not open it."""
    tls: TlsFiles | None = None
    """Certificates that encrypt connections to a store at `host:port`."""

    @property
    def is_single_host(self) -> bool:
        """Whether all ranks are on this host."""
        return self.endpoint.startswith(FILE_SCHEME)


def rendezvous(rank_info: RankInfo, generation: int = 0) -> Store:
    """The store through which the ranks of a world find each other; rank 0 opens it."""
    if rank_info.world_size == 1:
        return HashStore()
    if rank_info.is_single_host:
        file = FileStore(rank_info.endpoint.removeprefix(FILE_SCHEME), rank_info.world_size)
        file.set_timeout(TIMEOUT)
        return file
    if not rank_info.token:
        raise ValueError(f"a store at {rank_info.endpoint} needs a token: anybody who reaches the port could use it")
    if rank_info.rank or rank_info.is_served:
        return TokenStore(rank_info.endpoint, rank_info.token, generation, TIMEOUT, tls=rank_info.tls)
    host, _, port = rank_info.endpoint.rpartition(":")
    server = StoreServer(_listen(host.strip("[]"), int(port)), rank_info.token, generation, rank_info.tls)
    return TokenStore(rank_info.endpoint, rank_info.token, generation, TIMEOUT, server, rank_info.tls)


def _listen(host: str, port: int) -> socket.socket:
    """Listen on the given address only."""
    found = [(family, where[0]) for family, _, _, _, where in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]
    family, address = min(found, key=lambda each: ip_address(str(each[1]).partition("%")[0]).is_loopback)
    if ip_address(str(address).partition("%")[0]).is_loopback and _is_name_of_this_host(host):
        # A line such as "127.0.1.1 node7" in /etc/hosts: other hosts reach it by another address.
        warnings.warn(
            f"{host} is {address} on this host, which no other host reaches: the store listens on every interface",
            RuntimeWarning,
            stacklevel=2,
        )
        family, address = socket.AF_INET, "0.0.0.0"
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((address, port))
    listener.listen(socket.SOMAXCONN)
    return listener


def _is_name_of_this_host(host: str) -> bool:
    """Whether it is a host name, not an address or `localhost`."""
    try:
        ip_address(host)
    except ValueError:
        return host != "localhost"
    return False
