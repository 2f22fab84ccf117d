"""A store in the memory of another host: one process serves a store of its own, others read and write it over TCP.

    server = PeerServer(open_store("/dev/shm/danlu"), token, "10.0.0.7")
    store = PeerStore(server.address, token)          # in another process
    store.write("step-00000100/9f27ab01-000000.pack", [pack])

Both sides prove that they know the job's token before anything else is sent; nothing that arrives is ever executed.
Bytes are not encrypted: use an interface of a private network.
"""

import hmac
import json
import secrets
import socket
import socketserver
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from danlu.storage.store.base import PERMANENT_ERRORS, Store
from danlu.storage.store.safe_path import Buffer, byte_view, check_path, short_read_error

TIMEOUT = 30.0
"""Seconds without a byte after which the peer counts as dead."""
_POLL_SECONDS = 0.02
"""How soon a server notices that it is to stop: ranks that regroup wait for it."""
_MAX_MESSAGE_BYTES = 64 << 10
_BLOCK_BYTES = 4 << 20
_NONCE_BYTES = 32
_ERRORS: Mapping[str, type[Exception]] = {kind.__name__: kind for kind in (*PERMANENT_ERRORS, ValueError)}


class PeerServer:
    """Serves a store to clients that know the token, in threads of this process."""

    def __init__(self, store: Store, token: bytes, host: str) -> None:
        """Listen on one interface, `host`."""
        if host in ("", "0.0.0.0", "::"):
            raise ValueError(f"a peer store must listen on one interface, but `host` is {host!r}; give its address")
        self._server = _Server((host, 0), store, token)
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(_POLL_SECONDS,), name="danlu-peer", daemon=True
        )
        self._thread.start()

    @property
    def address(self) -> str:
        """`host:port`, for `PeerStore`."""
        host, port = self._server.server_address[:2]
        return f"{host!s}:{port}"

    def close(self) -> None:
        """Stop listening; running requests are aborted."""
        self._server.shutdown()
        self._server.server_close()


class PeerStore:
    """The store that a `PeerServer` at `address` serves. Raises ConnectionError when that is gone."""

    def __init__(self, address: str, token: bytes, timeout: float = TIMEOUT) -> None:
        host, _, port = address.rpartition(":")
        self._endpoint = host, int(port)
        self._token = token
        self._timeout = timeout
        self._idle: list[socket.socket] = []
        self._busy: set[socket.socket] = set()
        self._lock = threading.Lock()

    @property
    def name(self) -> str:
        """Name for messages."""
        return f"peer {self._endpoint[0]}:{self._endpoint[1]}"

    def write(self, path: str, parts: Iterable[Buffer]) -> None:
        """Create or replace a file."""
        views = [byte_view(part) for part in parts]
        with self._request({"ask": "write", "path": check_path(path), "length": sum(map(len, views))}) as connection:
            for piece in views:
                connection.sendall(piece)
            _receive_reply(connection)

    def create(self, path: str, data: Buffer) -> None:
        """Create a file; FileExistsError if there is one."""
        content = byte_view(data)
        with self._request({"ask": "create", "path": check_path(path), "length": len(content)}) as connection:
            connection.sendall(content)
            _receive_reply(connection)

    def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
        """Bytes of a file from `offset`."""
        wanted = max(0, self.size(path) - offset) if length is None else length
        content = bytearray(wanted)
        self.read_into(path, offset, memoryview(content))
        return bytes(content)

    def read_into(self, path: str, offset: int, into: memoryview) -> None:
        """Fill `into` with the bytes of a file from `offset`."""
        with self._request(
            {"ask": "read", "path": check_path(path), "offset": offset, "length": len(into)}
        ) as connection:
            _receive_reply(connection)
            _receive_into(connection, into)

    def size(self, path: str) -> int:
        """Bytes in a file; FileNotFoundError if there is none."""
        with self._request({"ask": "size", "path": check_path(path)}) as connection:
            return int(_receive_reply(connection)["size"])

    def list(self, folder: str = "") -> list[str]:
        """Names directly inside a folder."""
        with self._request({"ask": "list", "path": check_path(folder) if folder else ""}) as connection:
            return [str(name) for name in _receive_reply(connection)["names"]]

    def remove(self, path: str) -> None:
        """Remove a file or a folder."""
        with self._request({"ask": "remove", "path": check_path(path)}) as connection:
            _receive_reply(connection)

    def remove_except(self, folder: str, keep: str) -> None:
        """Remove all entries of a folder except those with the prefix `keep`."""
        with self._request({"ask": "sweep", "path": check_path(folder), "keep": keep}) as connection:
            _receive_reply(connection)

    def free_bytes(self) -> int | None:
        """Bytes that may still be written, or None if unknown."""
        with self._request({"ask": "free"}) as connection:
            found = _receive_reply(connection)["free"]
            return None if found is None else int(found)

    def close(self) -> None:
        """Close the connections; requests of other threads are aborted."""
        with self._lock:
            idle, self._idle = self._idle, []
            for connection in self._busy:
                with suppress(OSError):  # it has ended by itself
                    connection.shutdown(socket.SHUT_RDWR)
        for connection in idle:
            connection.close()

    @contextmanager
    def _request(self, request: Mapping[str, Any]) -> Iterator[socket.socket]:
        """A connection on which the request was sent; reused afterwards unless an error occurred."""
        with self._lock:
            connection = self._idle.pop() if self._idle else None
        connection = connection or self._connect()
        with self._lock:
            self._busy.add(connection)
        try:
            _send_message(connection, request)
            yield connection
        except _REMOTE_ERRORS:
            self._forget(connection)  # unread bytes may be left; a new connection costs little
            raise
        except OSError as error:
            self._forget(connection)
            raise ConnectionError(f"{self.name} does not answer: {error}") from error
        else:
            with self._lock:
                self._busy.discard(connection)
                self._idle.append(connection)

    def _forget(self, connection: socket.socket) -> None:
        with self._lock:
            self._busy.discard(connection)
        connection.close()

    def _connect(self) -> socket.socket:
        try:
            connection = socket.create_connection(self._endpoint, timeout=self._timeout)
        except OSError as error:
            raise ConnectionError(f"{self.name} does not answer: {error}") from error
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        mine = secrets.token_bytes(_NONCE_BYTES)
        connection.sendall(mine)
        theirs, proof = bytes(_receive(connection, _NONCE_BYTES)), bytes(_receive(connection, 32))
        if not hmac.compare_digest(proof, _auth_digest(self._token, b"server", mine, theirs)):
            connection.close()
            raise ConnectionError(f"{self.name} does not know this job's token; it belongs to another run")
        connection.sendall(_auth_digest(self._token, b"client", mine, theirs))
        return connection


class _RemoteError(OSError):
    """An error of the served store."""


_REMOTE_ERRORS: tuple[type[Exception], ...] = (*_ERRORS.values(), _RemoteError)


class _Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = True

    def __init__(self, where: tuple[str, int], store: Store, token: bytes) -> None:
        self.store = store
        self.token = token
        super().__init__(where, _RequestHandler)


class _RequestHandler(socketserver.BaseRequestHandler):
    """One client, from authentication to its last request."""

    server: _Server
    request: socket.socket

    def handle(self) -> None:
        connection = self.request
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.settimeout(TIMEOUT)
        try:
            theirs, mine = bytes(_receive(connection, _NONCE_BYTES)), secrets.token_bytes(_NONCE_BYTES)
            connection.sendall(mine + _auth_digest(self.server.token, b"server", theirs, mine))
            proof = bytes(_receive(connection, 32))
            if not hmac.compare_digest(proof, _auth_digest(self.server.token, b"client", theirs, mine)):
                return
            connection.settimeout(None)  # a client may be silent between two saves
            while (request := _receive_message(connection)) is not None:
                connection.settimeout(TIMEOUT)
                self._serve(connection, request)
                connection.settimeout(None)
        except (OSError, EOFError, ValueError, KeyError):
            return  # the client is gone or sent nonsense: close its connection; others are not affected

    def _serve(self, connection: socket.socket, request: Mapping[str, Any]) -> None:
        store, path = self.server.store, str(request.get("path", ""))
        incoming = _RequestBody(connection, int(request.get("length", 0)))
        try:
            match request.get("ask"):
                case "read":
                    content = self._read(path, int(request["offset"]), int(request["length"]))
                    _send_message(connection, {})
                    connection.sendall(content)
                    return
                case "write":
                    store.write(path, iter(incoming))
                    reply: dict[str, Any] = {}
                case "create":
                    store.create(path, b"".join(incoming))
                    reply = {}
                case "size":
                    reply = {"size": store.size(path)}
                case "list":
                    reply = {"names": store.list(path)}
                case "remove":
                    store.remove(path)
                    reply = {}
                case "sweep":
                    store.remove_except(path, str(request["keep"]))
                    reply = {}
                case "free":
                    reply = {"free": store.free_bytes()}
                case other:
                    reply = {"error": "ValueError", "message": f"{other!r} is no request"}
        except (OSError, EOFError, ValueError) as error:
            kind = next((name for name, known in _ERRORS.items() if isinstance(error, known)), "OSError")
            reply = {"error": kind, "message": str(error)[:1000]}
        if request.get("ask") in ("write", "create"):
            incoming.skip()
        _send_message(connection, reply)

    def _read(self, path: str, offset: int, length: int) -> bytearray:
        size = self.server.store.size(path)
        if length < 0 or offset < 0 or offset + length > size:
            raise short_read_error(
                self.server.store.name, path, offset, length, size
            )  # before allocating memory for it
        content = bytearray(length)
        if length:
            self.server.store.read_into(path, offset, memoryview(content))
        return content


class _RequestBody:
    """The bytes that follow a request, in blocks."""

    def __init__(self, connection: socket.socket, length: int) -> None:
        self.connection = connection
        self.left = length

    def __iter__(self) -> Iterator[bytearray]:
        while self.left:
            piece = _receive(self.connection, min(self.left, _BLOCK_BYTES))
            self.left -= len(piece)
            yield piece

    def skip(self) -> None:
        """Discard the unread rest, so that the next request is found."""
        for _ in self:
            pass


def _auth_digest(token: bytes, who: bytes, client: bytes, server: bytes) -> bytes:
    return hmac.digest(token, b"danlu peer 1 " + who + client + server, "sha256")


def _send_message(connection: socket.socket, message: Mapping[str, Any]) -> None:
    text = json.dumps(message).encode()
    connection.sendall(len(text).to_bytes(4, "little") + text)


def _receive_message(connection: socket.socket) -> dict[str, Any] | None:
    """The next message, or None when the peer closed the connection."""
    head = connection.recv(4, socket.MSG_WAITALL)
    if not head:
        return None
    length = int.from_bytes(head, "little")
    if len(head) < 4 or length > _MAX_MESSAGE_BYTES:
        raise ValueError(f"a message must have at most {_MAX_MESSAGE_BYTES} bytes, but {length} were announced")
    message = json.loads(bytes(_receive(connection, length)))
    if not isinstance(message, dict):
        raise ValueError("a message must be an object")
    return message


def _receive_reply(connection: socket.socket) -> dict[str, Any]:
    reply = _receive_message(connection)
    if reply is None:
        raise ConnectionResetError("it closed the connection")
    if "error" in reply:
        raise _ERRORS.get(str(reply["error"]), _RemoteError)(str(reply.get("message", "")))
    return reply


def _receive(connection: socket.socket, length: int) -> bytearray:
    content = bytearray(length)
    _receive_into(connection, memoryview(content))
    return content


def _receive_into(connection: socket.socket, into: memoryview) -> None:
    done = 0
    while done < len(into):
        count = connection.recv_into(into[done:])
        if not count:
            raise ConnectionResetError(f"it closed the connection after {done} of {len(into)} bytes")
        done += count
