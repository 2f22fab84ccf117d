"""This host's network interfaces: by address, and by what they lead to. No torch."""

import fcntl
import socket
import struct
from array import array
from ipaddress import ip_address
from pathlib import Path

_SIOCGIFCONF = 0x8912
_REQUEST_BYTES, _MOST_ADDRESSES = 40, 4096
"""Of `struct ifreq` on a system of 64 bits: a name of 16 bytes, then a socket's address."""


def address_towards(endpoint: str) -> str:
    """This host's address on the network over which it reaches `host:port`."""
    host, _, port = endpoint.rpartition(":")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # sends nothing; the system chooses an interface
        probe.connect((host, int(port)))
        return str(probe.getsockname()[0])


def interface_of(address: str) -> str:
    """The interface that has an address, as libraries want it named; `OSError` if none of this host's does."""
    wanted = ip_address(address.partition("%")[0])
    found = _ipv4_interfaces() if wanted.version == 4 else _ipv6_interfaces()
    for name, one in found:
        if ip_address(one) == wanted:
            return name
    raise OSError(f"no interface of this host has the address {address}; it has {dict(found)}")


def _ipv4_interfaces() -> list[tuple[str, str]]:
    """Every address, of an interface that has several all of them."""
    space = array("B", bytes(_MOST_ADDRESSES * _REQUEST_BYTES))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        request = struct.pack("iL", len(space), space.buffer_info()[0])
        used = struct.unpack("iL", fcntl.ioctl(control.fileno(), _SIOCGIFCONF, request))[0]
    found = []
    for at in range(0, used, _REQUEST_BYTES):
        label = space[at : at + 16].tobytes().partition(b"\0")[0].decode()
        found.append((label.partition(":")[0], socket.inet_ntoa(space[at + 20 : at + 24].tobytes())))
    return found


def _ipv6_interfaces() -> list[tuple[str, str]]:
    rows = [line.split() for line in Path("/proc/net/if_inet6").read_text().splitlines()]
    return [(row[5], socket.inet_ntop(socket.AF_INET6, bytes.fromhex(row[0]))) for row in rows]
