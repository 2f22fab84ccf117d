"""What another account of the same machine tries against a run; prints, as JSON, all in which it had success.

    python stranger.py QUESTION.json

The question names files and folders of the run, its processes, and the ports they listen on.
"""

import json
import os
import signal
import socket
import struct
import sys
from contextlib import suppress
from pathlib import Path


def main(question: dict[str, list[str | int]]) -> list[str]:
    """Try everything."""
    found = []
    for path in map(str, question["paths"]):
        with suppress(PermissionError):
            os.listdir(path) if Path(path).is_dir() else Path(path).read_bytes()  # noqa: PTH208
            found.append(f"read {path}")
        with suppress(OSError):
            os.open(path, os.O_WRONLY)
            found.append(f"opened {path} for writing")
    for process in map(int, question["processes"]):
        with suppress(PermissionError):
            os.kill(process, signal.SIGTERM)
            found.append(f"signalled {process}")
        with suppress(OSError):
            Path(f"/proc/{process}/environ").read_bytes()
            found.append(f"read the environment of {process}")
    kept = [connection for port in question["ports"] for connection in bothered(int(port))]
    found += joined([int(port) for port in question["ports"]])
    for connection in kept:
        connection.close()
    return found


def bothered(port: int) -> list[socket.socket]:
    """Connections to a port: one that says nothing, some that call themselves pair 0, 1, 2 …, as gloo's pairs do."""
    kept = [socket.create_connection(("127.0.0.1", port), timeout=5)]
    for number in range(16):
        connection = socket.create_connection(("127.0.0.1", port), timeout=5)
        with suppress(OSError):
            connection.sendall(struct.pack("<q", number) + os.urandom(256))
        kept.append(connection)
    return kept


def joined(ports: list[int]) -> list[str]:
    """Ports behind which a store of `torch.distributed` answers, as it does to whoever asks."""
    validate, ping, nonce = struct.pack("<BI", 0, 0x3C85F7CE), 13, struct.pack("<I", 4711)
    found = []
    for port in ports:
        with socket.create_connection(("127.0.0.1", port), timeout=2) as connection, suppress(OSError):
            connection.sendall(validate + bytes([ping]) + nonce)
            if connection.recv(4) == nonce:
                found.append(f"joined the store at port {port}")
    return found


if __name__ == "__main__":
    print(json.dumps(main(json.loads(Path(sys.argv[1]).read_text()))))
