"""A store in the memory of another host: one process serves a store of its own, others read and write it over TCP.

    server = PeerServer(open_store("/dev/shm/danlu"), token, "10.0.0.7")
    store = PeerStore(server.address, token)          # in another process
    store.write("step-00000100/9f27ab01-000000.pack", [pack])

Both sides prove that they know the job's token before anything else is said; nothing that arrives is ever run. Bytes
are not encrypted: give it an interface of a private network.
"""

import hmac
import json
import secrets
import socket
import socketserver
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from danlu.storage.store import Buffer, Store
from danlu.storage.store_path import plain, safe, shortage

TIMEOUT = 30.0
"""Seconds without a byte after which the other side counts as gone."""
_LONGEST_LINE = 64 << 10
_PIECE = 4 << 20
_NONCE = 32
_ERRORS: Mapping[str, type[Exception]] = {
    "FileNotFoundError": FileNotFoundError,
    "FileExistsError": FileExistsError,
    "IsADirectoryError": IsADirectoryError,
    "NotADirectoryError": NotADirectoryError,
    "PermissionError": PermissionError,
    "EOFError": EOFError,
    "ValueError": ValueError,
}


class PeerServer:
    """Serves a store to whoever knows the token, in threads of this process."""

    def __init__(self, store: Store, token: bytes, host: str, limit: int | None = None) -> None:
        """Listen on one interface, `host`; others may not fill the store beyond `limit` bytes a file."""
        if host in ("", "0.0.0.0", "::"):
            raise ValueError(f"a peer store must listen on one interface, but `host` is {host!r}; name its address")
        self._server = _Server((host, 0), store, token, limit)
        self._thread = threading.Thread(target=self._server.serve_forever, name="danlu-peer", daemon=True)
        self._thread.start()

    @property
    def address(self) -> str:
        """`host:port`, for `PeerStore`."""
        host, port = self._server.server_address[:2]
        return f"{host!s}:{port}"

    def close(self) -> None:
        """Stop listening; what is under way is cut off."""
        self._server.shutdown()
        self._server.server_close()


class PeerStore:
    """The store that a `PeerServer` at `address` serves. Raises ConnectionError when it is gone."""

    def __init__(self, address: str, token: bytes, timeout: float = TIMEOUT) -> None:
        host, _, port = address.rpartition(":")
        self._where = host, int(port)
        self._token = token
        self._timeout = timeout
        self._idle: list[socket.socket] = []
        self._lock = threading.Lock()

    @property
    def name(self) -> str:
        """What to call it in messages."""
        return f"peer {self._where[0]}:{self._where[1]}"

    def write(self, path: str, parts: Iterable[Buffer]) -> None:
        """Make or replace a file there."""
        pieces = [plain(part) for part in parts]
        with self._asking({"ask": "write", "path": safe(path), "length": sum(map(len, pieces))}) as line:
            for piece in pieces:
                line.sendall(piece)
            _answer(line)

    def create(self, path: str, data: Buffer) -> None:
        """Make a file there if there is none; FileExistsError otherwise."""
        content = plain(data)
        with self._asking({"ask": "create", "path": safe(path), "length": len(content)}) as line:
            line.sendall(content)
            _answer(line)

    def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
        """Bytes of a file from `offset`."""
        wanted = max(0, self.size(path) - offset) if length is None else length
        content = bytearray(wanted)
        self.read_into(path, offset, memoryview(content))
        return bytes(content)

    def read_into(self, path: str, offset: int, into: memoryview) -> None:
        """Fill `into` with the bytes of a file from `offset`."""
        with self._asking({"ask": "read", "path": safe(path), "offset": offset, "length": len(into)}) as line:
            _answer(line)
            _receive_into(line, into)

    def size(self, path: str) -> int:
        """Bytes in a file; FileNotFoundError if there is none."""
        with self._asking({"ask": "size", "path": safe(path)}) as line:
            return int(_answer(line)["size"])

    def list(self, folder: str = "") -> list[str]:
        """Names directly inside a folder."""
        with self._asking({"ask": "list", "path": safe(folder) if folder else ""}) as line:
            return [str(name) for name in _answer(line)["names"]]

    def remove(self, path: str) -> None:
        """Take away a file or a folder."""
        with self._asking({"ask": "remove", "path": safe(path)}) as line:
            _answer(line)

    def sweep(self, folder: str, keep: str) -> None:
        """Take away all that is directly inside a folder and does not begin with `keep`."""
        with self._asking({"ask": "sweep", "path": safe(folder), "keep": keep}) as line:
            _answer(line)

    def free(self) -> int | None:
        """Bytes that may still be written there, where it can be told."""
        with self._asking({"ask": "free"}) as line:
            found = _answer(line)["free"]
            return None if found is None else int(found)

    def close(self) -> None:
        """End the connections."""
        with self._lock:
            idle, self._idle = self._idle, []
        for line in idle:
            line.close()

    @contextmanager
    def _asking(self, question: Mapping[str, Any]) -> Iterator[socket.socket]:
        """A connection with a question on it; used again afterwards unless something went wrong on it."""
        with self._lock:
            line = self._idle.pop() if self._idle else None
        line = line or self._connect()
        try:
            _say(line, question)
            yield line
        except _TOLD:
            line.close()  # bytes may be left on it; a new one costs little
            raise
        except OSError as error:
            line.close()
            raise ConnectionError(f"{self.name} does not answer: {error}") from error
        else:
            with self._lock:
                self._idle.append(line)

    def _connect(self) -> socket.socket:
        try:
            line = socket.create_connection(self._where, timeout=self._timeout)
        except OSError as error:
            raise ConnectionError(f"{self.name} does not answer: {error}") from error
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        mine = secrets.token_bytes(_NONCE)
        line.sendall(mine)
        theirs, proof = bytes(_receive(line, _NONCE)), bytes(_receive(line, 32))
        if not hmac.compare_digest(proof, _proof(self._token, b"server", mine, theirs)):
            line.close()
            raise ConnectionError(f"{self.name} does not know this job's token; it belongs to another run")
        line.sendall(_proof(self._token, b"client", mine, theirs))
        return line


class _RefusedError(OSError):
    """The other side has the store's own error to tell."""


_TOLD: tuple[type[Exception], ...] = (*_ERRORS.values(), _RefusedError)


class _Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = True

    def __init__(self, where: tuple[str, int], store: Store, token: bytes, limit: int | None) -> None:
        self.store = store
        self.token = token
        self.limit = limit
        super().__init__(where, _Conversation)


class _Conversation(socketserver.BaseRequestHandler):
    """One client, from its proof to its last question."""

    server: _Server
    request: socket.socket

    def handle(self) -> None:
        line = self.request
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        line.settimeout(TIMEOUT)
        try:
            theirs, mine = bytes(_receive(line, _NONCE)), secrets.token_bytes(_NONCE)
            line.sendall(mine + _proof(self.server.token, b"server", theirs, mine))
            proof = bytes(_receive(line, 32))
            if not hmac.compare_digest(proof, _proof(self.server.token, b"client", theirs, mine)):
                return
            line.settimeout(None)  # a client may be silent between two saves
            while (question := _hear(line)) is not None:
                line.settimeout(TIMEOUT)
                self._serve(line, question)
                line.settimeout(None)
        except (OSError, EOFError, ValueError, KeyError):
            return  # the client is gone or talks nonsense: its connection ends, and no other is touched

    def _serve(self, line: socket.socket, question: Mapping[str, Any]) -> None:
        store, path = self.server.store, str(question.get("path", ""))
        incoming = _Incoming(line, int(question.get("length", 0)))
        try:
            match question.get("ask"):
                case "read":
                    content = self._read(path, int(question["offset"]), int(question["length"]))
                    _say(line, {})
                    line.sendall(content)
                    return
                case "write":
                    self._bounded(incoming.left)
                    store.write(path, iter(incoming))
                    answer: dict[str, Any] = {}
                case "create":
                    self._bounded(incoming.left)
                    store.create(path, b"".join(incoming))
                    answer = {}
                case "size":
                    answer = {"size": store.size(path)}
                case "list":
                    answer = {"names": store.list(path)}
                case "remove":
                    store.remove(path)
                    answer = {}
                case "sweep":
                    store.sweep(path, str(question["keep"]))
                    answer = {}
                case "free":
                    answer = {"free": store.free()}
                case other:
                    answer = {"error": "ValueError", "message": f"{other!r} is no question"}
        except (OSError, EOFError, ValueError) as error:
            kind = next((name for name, known in _ERRORS.items() if isinstance(error, known)), "OSError")
            answer = {"error": kind, "message": str(error)[:1000]}
        if question.get("ask") in ("write", "create"):
            incoming.skip()
        _say(line, answer)

    def _read(self, path: str, offset: int, length: int) -> bytearray:
        size = self.server.store.size(path)
        if length < 0 or offset < 0 or offset + length > size:
            raise shortage(self.server.store.name, path, offset, length, size)  # before memory is taken for it
        content = bytearray(length)
        if length:
            self.server.store.read_into(path, offset, memoryview(content))
        return content

    def _bounded(self, length: int) -> int:
        if length < 0 or (self.server.limit is not None and length > self.server.limit):
            raise ValueError(f"a file must have at most {self.server.limit} bytes, but {length} were asked for")
        return length


class _Incoming:
    """The bytes that follow a question, in pieces."""

    def __init__(self, line: socket.socket, length: int) -> None:
        self.line = line
        self.left = length

    def __iter__(self) -> Iterator[bytearray]:
        while self.left:
            piece = _receive(self.line, min(self.left, _PIECE))
            self.left -= len(piece)
            yield piece

    def skip(self) -> None:
        """Let what was not taken pass by, so that the next question is found."""
        for _ in self:
            pass


def _proof(token: bytes, who: bytes, client: bytes, server: bytes) -> bytes:
    return hmac.digest(token, b"danlu peer 1 " + who + client + server, "sha256")


def _say(line: socket.socket, message: Mapping[str, Any]) -> None:
    text = json.dumps(message).encode()
    line.sendall(len(text).to_bytes(4, "little") + text)


def _hear(line: socket.socket) -> dict[str, Any] | None:
    """The next message, or None when the other side has hung up."""
    head = line.recv(4, socket.MSG_WAITALL)
    if not head:
        return None
    length = int.from_bytes(head, "little")
    if len(head) < 4 or length > _LONGEST_LINE:
        raise ValueError(f"a message must have at most {_LONGEST_LINE} bytes, but {length} were announced")
    message = json.loads(bytes(_receive(line, length)))
    if not isinstance(message, dict):
        raise ValueError("a message must be an object")
    return message


def _answer(line: socket.socket) -> dict[str, Any]:
    answer = _hear(line)
    if answer is None:
        raise ConnectionResetError("it hung up")
    if "error" in answer:
        raise _ERRORS.get(str(answer["error"]), _RefusedError)(str(answer.get("message", "")))
    return answer


def _receive(line: socket.socket, length: int) -> bytearray:
    content = bytearray(length)
    _receive_into(line, memoryview(content))
    return content


def _receive_into(line: socket.socket, into: memoryview) -> None:
    done = 0
    while done < len(into):
        count = line.recv_into(into[done:])
        if not count:
            raise ConnectionResetError(f"it hung up after {done} of {len(into)} bytes")
        done += count
