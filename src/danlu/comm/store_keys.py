"""The keys and values of a rendezvous store, and those who wait for them; bounded."""

import asyncio

from danlu.comm.store_channel import MAX_FRAME_BYTES

MAX_KEYS = 10_000_000
MAX_VALUE_BYTES = MAX_FRAME_BYTES - 16
"""So that it fits into one answer."""
MAX_TOTAL_BYTES = 1 << 30
_FIELD_BYTES = 4
"""What a field of an answer takes beside its contents."""


class StoreKeys(dict[bytes, bytes]):
    """Written through `put`, `add`, `compare_set` and `delete`, from one event loop."""

    def __init__(self) -> None:
        super().__init__()
        self._size = 0
        self._waiters: dict[bytes, set[asyncio.Future[None]]] = {}
        self.written: dict[bytes, bytes] | None = None
        """What was put since it was last taken; None if nobody takes it."""

    def put(self, key: bytes, value: bytes) -> None:
        """Set a key and wake who waits for it; `ValueError` if the store is full."""
        if len(value) > MAX_VALUE_BYTES:
            raise ValueError(f"a value must have at most {MAX_VALUE_BYTES:,} bytes, but has {len(value):,}")
        before = self.get(key)
        grown = self._size + len(value) + (len(key) if before is None else -len(before))
        if grown > MAX_TOTAL_BYTES or (before is None and len(self) >= MAX_KEYS):
            raise ValueError(f"the store is full: {len(self):,} keys, {self._size:,} bytes")
        self[key], self._size = value, grown
        if self.written is not None:
            self.written[key] = value
        for waiter in self._waiters.pop(key, ()):
            if not waiter.done():
                waiter.set_result(None)

    def add(self, key: bytes, number: int) -> bytes:
        """Add to a number, which begins at 0; `ValueError` if it is none."""
        total = b"%d" % (int(self.get(key, b"0")) + number)
        self.put(key, total)
        return total

    def compare_set(self, key: bytes, expected: bytes, desired: bytes) -> bytes:
        """Set a key that has the expected value, or has none if that is empty; the value it has then."""
        found = self.get(key)
        if found == expected or (found is None and not expected):
            self.put(key, desired)
            return desired
        return expected if found is None else found

    def delete(self, key: bytes) -> bool:
        """Whether there was such a key."""
        if (value := self.pop(key, None)) is None:
            return False
        self._size -= len(key) + len(value)
        return True

    def first_values(self, keys: list[bytes]) -> list[bytes]:
        """The values of as many of the first keys as fit into one answer; none unless all are there."""
        found, left = [], MAX_FRAME_BYTES
        for key in keys if all(key in self for key in keys) else ():
            left -= _FIELD_BYTES + len(self[key])
            if left < _FIELD_BYTES:
                break
            found.append(self[key])
        return found

    async def wait(self, keys: list[bytes], seconds: float) -> bool:
        """Whether all keys were there within so many seconds."""
        try:
            async with asyncio.timeout(seconds):
                for key in keys:
                    while key not in self:
                        await self._written(key)
        except TimeoutError:
            return False
        return True

    async def _written(self, key: bytes) -> None:
        waiter = asyncio.get_running_loop().create_future()
        waiting = self._waiters.setdefault(key, set())
        waiting.add(waiter)
        try:
            await waiter
        finally:
            waiting.discard(waiter)
            if not waiting and self._waiters.get(key) is waiting:
                del self._waiters[key]
