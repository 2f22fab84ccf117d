"""This host's network interfaces: by address, and by what they lead to. No torch."""

import fcntl
import socket
import struct
from ipaddress import ip_address
from pathlib import Path

_SIOCGIFADDR = 0x8915


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
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                raw = fcntl.ioctl(control.fileno(), _SIOCGIFADDR, request)
            except OSError:  # it has no address
                continue
            found.append((name, socket.inet_ntoa(raw[20:24])))
    return found


def _ipv6_interfaces() -> list[tuple[str, str]]:
    rows = [line.split() for line in Path("/proc/net/if_inet6").read_text().splitlines()]
    return [(row[5], socket.inet_ntop(socket.AF_INET6, bytes.fromhex(row[0]))) for row in rows]
