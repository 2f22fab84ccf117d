"""A rendezvous store for ranks of several hosts, which only holders of the job's token can use: torch's `Store`."""

import socket
import threading
import time
from contextlib import suppress
from datetime import timedelta

from torch.distributed import DistStoreError

from danlu.comm.store_channel import (
    HEADER_BYTES,
    NONCE_BYTES,
    PROOF_BYTES,
    ChannelError,
    Handshake,
    Hello,
    body_length,
    decode_fields,
    encode_fields,
    new_nonce,
)
from danlu.comm.store_server import Reply, Request, StoreServer
from danlu.torch_compat import Store

_FIRST_RETRY, _SLOWEST_RETRY = 0.02, 1.0
_ANSWER_SECONDS = 60.0
"""Silence of the server after which it counts as dead; waits are asked for in shorter pieces."""
_WAIT_MILLISECONDS = 1000
"""Longest piece: other threads get their turn between two."""


class TokenStore(Store):
    """Keys that a `StoreServer` at `endpoint` keeps; raises `DistStoreError` when it cannot be reached or refuses.

    Torch does not keep a store that is written in Python: whoever gives it away must keep it for as long.
    """

    def __init__(
        self, endpoint: str, token: bytes, generation: int, timeout: timedelta, server: StoreServer | None = None
    ) -> None:
        """Connect, and try again until the server is there or the time is over; a server of this process is kept."""
        super().__init__()
        self._timeout = timeout
        self.endpoint, self.generation = endpoint, generation
        self._token, self._lock, self._server = token, threading.Lock(), server
        self._clones: list[TokenStore] = []
        self._connection = self._connect(time.monotonic() + timeout.total_seconds())

    def clone(self) -> "TokenStore":
        """The same keys over a connection of its own."""
        self._clones.append(TokenStore(self.endpoint, self._token, self.generation, self._timeout))
        return self._clones[-1]

    def close(self) -> None:
        """Leave the store, and end its server if it is of this process."""
        if hasattr(self, "_connection"):
            self._connection.close()
        if self._server is not None:
            self._server.close()

    def __del__(self) -> None:
        self.close()

    def set(self, key: str, value: str | bytes) -> None:
        """Set a key."""
        self._ask(Request.SET, key, value)

    def append(self, key: str, value: str | bytes) -> None:
        """Append to the value of a key."""
        self._ask(Request.APPEND, key, value)

    def get(self, key: str) -> bytes:
        """The value of a key, which is waited for."""
        self.wait([key])
        found = self._ask(Request.GET, key)
        if not found:
            raise DistStoreError(f"{key!r} was deleted while it was read")
        return found[0]

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """The values of several keys, which are waited for."""
        return [self.get(key) for key in keys]

    def multi_set(self, keys: list[str], values: list[str | bytes]) -> None:
        """Set several keys."""
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def add(self, key: str, value: int) -> int:
        """Add to a number, which begins at 0; its new value."""
        return int(self._one(Request.ADD, key, str(value)))

    def compare_set(self, key: str, expected_value: str | bytes, desired_value: str | bytes) -> bytes:
        """Set a key that has the expected value, or has none if that is empty; the value it has then."""
        return self._one(Request.COMPARE_SET, key, expected_value, desired_value)

    def check(self, keys: list[str]) -> bool:
        """Whether all of these keys are set."""
        return self._one(Request.CHECK, *keys) == b"1"

    def delete_key(self, key: str) -> bool:
        """Delete a key; whether there was one."""
        return self._one(Request.DELETE, key) == b"1"

    def num_keys(self) -> int:
        """Number of keys."""
        return int(self._one(Request.COUNT))

    def has_extended_api(self) -> bool:
        """`append`, `multi_get` and `multi_set` exist."""
        return True

    def set_timeout(self, timeout: timedelta) -> None:
        """How long `get` and `wait` wait."""
        super().set_timeout(timeout)
        self._timeout = timeout

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys are set."""
        allowed = (self._timeout if timeout is None else timeout).total_seconds()
        deadline = time.monotonic() + allowed
        while True:
            left = max(0, min(_WAIT_MILLISECONDS, round(1000 * (deadline - time.monotonic()))))
            if self._ask(Request.WAIT, str(left), *keys) is not None:
                return
            if time.monotonic() >= deadline:
                shown = ", ".join(keys[:4]) + (f" and {len(keys) - 4} more" if len(keys) > 4 else "")
                raise DistStoreError(f"{shown} must be set within {allowed:.0f} s, but no rank has set it")

    def _one(self, request: Request, *fields: str | bytes) -> bytes:
        found = self._ask(request, *fields)
        assert found, request
        return found[0]

    def _ask(self, request: Request, *fields: str | bytes) -> list[bytes] | None:
        """The fields of the answer; None if what was asked for is missing."""
        raw = encode_fields(request, *(each.encode() if isinstance(each, str) else bytes(each) for each in fields))
        with self._lock:
            try:
                self._connection.sendall(self._mine.seal(raw))
                code, answer = self._receive(self._connection)
            except (OSError, ChannelError) as error:
                self._connection.close()
                raise DistStoreError(f"the store at {self.endpoint} does not answer: {error}") from None
        if code == Reply.REFUSED:
            raise DistStoreError(f"the store at {self.endpoint} refused: {answer[0].decode(errors='replace')}")
        if code == Reply.STALE:
            raise self._stale(answer)
        return None if code == Reply.MISSING else answer

    def _stale(self, answer: list[bytes]) -> DistStoreError:
        now = answer[0].decode(errors="replace")
        return DistStoreError(f"generation {self.generation} of this run is over: the store serves generation {now}")

    def _connect(self, deadline: float) -> socket.socket:
        host, _, port = self.endpoint.rpartition(":")
        pause = _FIRST_RETRY
        while True:
            try:
                connection = socket.create_connection((host.strip("[]"), int(port)), timeout=_ANSWER_SECONDS)
                with suppress(OSError):
                    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                return self._greet(connection)
            except OSError as error:
                if time.monotonic() > deadline:
                    raise DistStoreError(
                        f"the store at {self.endpoint} must be reached within {self._timeout.total_seconds():.0f} s, "
                        f"but: {error} (is rank 0 running, and does it have the same token?)"
                    ) from None
                time.sleep(pause)
                pause = min(1.5 * pause, _SLOWEST_RETRY)

    def _greet(self, connection: socket.socket) -> socket.socket:
        hello = Hello(self.generation, new_nonce())
        try:
            connection.sendall(hello.encode())
            raw = _receive_exactly(connection, NONCE_BYTES + PROOF_BYTES)
            handshake = Handshake(self._token, hello, raw[:NONCE_BYTES])
            try:
                handshake.check(b"server", raw[NONCE_BYTES:])
            except ChannelError as error:
                raise DistStoreError(f"who listens at {self.endpoint} is not this job's store: {error}") from None
            connection.sendall(handshake.proof(b"client"))
            self._mine, self._theirs = handshake.channels()
            code, answer = self._receive(connection)
            if code == Reply.STALE:
                raise self._stale(answer)
        except BaseException:
            connection.close()
            raise
        return connection

    def _receive(self, connection: socket.socket) -> tuple[int, list[bytes]]:
        header = _receive_exactly(connection, HEADER_BYTES)
        body = _receive_exactly(connection, body_length(header))
        return decode_fields(self._theirs.open(header, body))


def _receive_exactly(connection: socket.socket, count: int) -> bytes:
    received = bytearray()
    while len(received) < count:
        if not (some := connection.recv(count - len(received))):
            raise ConnectionResetError("it closed the connection")
        received += some
    return bytes(received)
