"""Serves the keys of a rendezvous store to ranks that know the job's token, in a thread of this process. No torch."""

import asyncio
import atexit
import socket
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from enum import IntEnum
from typing import TypeVar

from danlu.comm.store_channel import (
    HEADER_BYTES,
    HELLO_BYTES,
    PROOF_BYTES,
    ChannelError,
    Handshake,
    Hello,
    SigningKey,
    body_length,
    decode_fields,
    encode_fields,
    new_nonce,
)
from danlu.comm.store_keys import StoreKeys
from danlu.comm.store_tls import server_context
from danlu.spec.resilience import TlsFiles

Result = TypeVar("Result")
HANDSHAKE_SECONDS = 5.0
"""A connection that has not proven to know the token by then is closed."""
MAX_UNPROVEN = 4096
"""Connections that may be about to prove it at once; others are closed, and ranks try again."""
_LINGER_SECONDS = 0.1
MAX_WAIT_SECONDS = 10.0
"""Longest wait for a key in one request; who waits longer asks again."""


class Request(IntEnum):
    """What a client may ask for, and its fields."""

    SET = 1  # key, value
    GET = 2  # key
    ADD = 3  # key, number
    COMPARE_SET = 4  # key, expected, desired
    CHECK = 5  # keys
    WAIT = 6  # milliseconds, keys
    DELETE = 7  # key
    COUNT = 8
    APPEND = 9  # key, value
    READ = 10  # milliseconds, keys


class Reply(IntEnum):
    """What the server says."""

    OK = 1
    MISSING = 2
    REFUSED = 3
    STALE = 4
    """The client is of a generation that is over."""


class StoreServer:
    """Keys and values of the ranks of one generation; those of an earlier one can neither read nor write."""

    def __init__(self, listener: socket.socket, token: bytes, generation: int = 0, tls: TlsFiles | None = None) -> None:
        """Serve on a socket that listens already, encrypted if there are certificates."""
        self.generation = generation
        self._tls = server_context(tls) if tls else None
        self._token, self._listener = token, listener
        self._keys = StoreKeys()
        self._unproven = 0
        self._clients: set[asyncio.StreamWriter] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="danlu-store", daemon=True)
        self._thread.start()
        atexit.register(self.close)  # who waits for a key that was just set would not be told

    @property
    def address(self) -> str:
        """`host:port`."""
        host, port = self._listener.getsockname()[:2]
        return f"{host}:{port}"

    def advance(self, generation: int) -> None:
        """From now on serve a later generation, which finds no keys; connections of earlier ones are closed."""

        def change() -> None:
            self.generation = max(generation, self.generation)
            self._keys = StoreKeys()
            for client in self._clients:
                client.close()

        self._in_loop(change)

    def put(self, values: Mapping[str, str]) -> None:
        """Set keys from this process."""

        def change() -> None:
            for key, value in values.items():
                self._keys.put(key.encode(), value.encode())

        self._in_loop(change)

    def take_written(self) -> dict[str, bytes]:
        """The keys that were set since the last call, with their values; the first call finds none."""

        def change() -> dict[bytes, bytes]:
            written, self._keys.written = self._keys.written, {}
            return written or {}

        return {key.decode(): value for key, value in self._in_loop(change).items()}

    def _in_loop(self, change: Callable[[], Result]) -> Result:
        """Carry out a change in the thread that serves, and wait for it."""

        async def carry_out() -> Result:
            return change()

        return asyncio.run_coroutine_threadsafe(carry_out(), self._loop).result()

    def close(self) -> None:
        """Stop serving and close every connection, after what was asked so far is answered."""
        atexit.unregister(self.close)
        with suppress(RuntimeError):  # closed before
            self._loop.call_soon_threadsafe(self._loop.call_later, _LINGER_SECONDS, self._loop.stop)
        self._thread.join()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        patience = HANDSHAKE_SECONDS if self._tls else None
        starting = asyncio.start_server(self._serve, sock=self._listener, ssl=self._tls, ssl_handshake_timeout=patience)
        server = self._loop.run_until_complete(starting)
        try:
            self._loop.run_forever()
        finally:
            server.close()
            self._loop.run_until_complete(asyncio.sleep(_LINGER_SECONDS))  # connections that are half accepted
            left = list(self._clients)
            for task in (tasks := asyncio.all_tasks(self._loop)):
                task.cancel()
            self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
            for client in left:  # encrypted ones would wait for the other side's farewell
                client.transport.abort()
            self._loop.run_until_complete(asyncio.sleep(0))
            self._listener.close()
            self._loop.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._clients.add(writer)
        try:
            if (greeted := await self._greet(reader, writer)) is None:
                return
            generation, theirs, mine = greeted
            while True:
                header = await reader.readexactly(HEADER_BYTES)
                body = theirs.open(header, await reader.readexactly(body_length(header)))
                writer.write(mine.seal(await self._answer(body, generation)))
                await writer.drain()
        except (ChannelError, OSError, asyncio.IncompleteReadError, TimeoutError):
            pass  # it has left, or is nobody: there is no one to tell
        except asyncio.CancelledError:
            pass  # this server closes
        finally:
            self._clients.discard(writer)
            writer.close()

    async def _greet(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> tuple[int, SigningKey, SigningKey] | None:
        """The generation of a client that knows the token, and the keys of its frames and ours."""
        if self._unproven >= MAX_UNPROVEN:
            return None
        self._unproven += 1
        try:
            async with asyncio.timeout(HANDSHAKE_SECONDS):
                hello = Hello.decode(await reader.readexactly(HELLO_BYTES))
                handshake = Handshake(self._token, hello, new_nonce())
                writer.write(handshake.server_nonce + handshake.proof(b"server"))
                handshake.check(b"client", await reader.readexactly(PROOF_BYTES))
        finally:
            self._unproven -= 1
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        theirs, mine = handshake.channels()
        if hello.generation > self.generation:  # this server learns of it in a moment, and the client tries again
            return None
        is_stale = hello.generation < self.generation
        writer.write(mine.seal(self._stale() if is_stale else encode_fields(Reply.OK)))
        await writer.drain()
        return None if is_stale else (hello.generation, theirs, mine)

    def _stale(self) -> bytes:
        return encode_fields(Reply.STALE, str(self.generation).encode())

    async def _answer(self, body: bytes, generation: int) -> bytes:
        if generation != self.generation:
            return self._stale()
        code, fields = decode_fields(body)
        try:
            return await self._carry_out(code, fields)
        except ValueError as error:
            return encode_fields(Reply.REFUSED, str(error).encode())

    async def _carry_out(self, code: int, fields: list[bytes]) -> bytes:
        keys = self._keys
        match code, fields:
            case Request.SET, [key, value]:
                keys.put(key, value)
                return encode_fields(Reply.OK)
            case Request.APPEND, [key, value]:
                keys.put(key, keys.get(key, b"") + value)
                return encode_fields(Reply.OK)
            case Request.GET, [key]:
                return encode_fields(Reply.OK, keys[key]) if key in keys else encode_fields(Reply.MISSING)
            case Request.ADD, [key, number]:
                return encode_fields(Reply.OK, keys.add(key, int(number)))
            case Request.COMPARE_SET, [key, expected, desired]:
                return encode_fields(Reply.OK, keys.compare_set(key, expected, desired))
            case Request.CHECK, wanted:
                return encode_fields(Reply.OK, b"%d" % all(key in keys for key in wanted))
            case Request.WAIT, [milliseconds, *wanted]:
                found = await keys.wait(wanted, min(int(milliseconds) / 1000, MAX_WAIT_SECONDS))
                return encode_fields(Reply.OK if found else Reply.MISSING)
            case Request.READ, [milliseconds, *wanted]:
                await keys.wait(wanted, min(int(milliseconds) / 1000, MAX_WAIT_SECONDS))
                values = keys.first_values(wanted)
                return encode_fields(Reply.OK, *values) if values else encode_fields(Reply.MISSING)
            case Request.DELETE, [key]:
                return encode_fields(Reply.OK, b"%d" % keys.delete(key))
            case Request.COUNT, []:
                return encode_fields(Reply.OK, b"%d" % len(keys))
            case _:
                raise ValueError(f"there is no request {code} with {len(fields)} fields")
