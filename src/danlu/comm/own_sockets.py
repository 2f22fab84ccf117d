"""The sockets of this process, as the kernel lists them. No torch."""

from pathlib import Path


def own_sockets() -> dict[int, str]:
    """The inode of every open socket, by descriptor."""
    found = {}
    for descriptor in Path("/proc/self/fd").iterdir():
        try:
            name = str(descriptor.readlink())
        except OSError:  # closed meanwhile
            continue
        if name.startswith("socket:["):
            found[int(descriptor.name)] = name[8:-1]
    return found
