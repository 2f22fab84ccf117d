"""Large reads and writes past the page cache (O_DIRECT), several in flight at once.

The page cache costs a copy and the memory of the whole file, which a training job does not have to spare. Direct I/O
asks for memory, offset and length at multiples of a block; memory that is not, goes through an aligned buffer.
"""

import mmap
import queue
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from danlu.storage.calls import Calls

ALIGNMENT = 4096
"""What every disk and file system in use is content with."""
BLOCK = 8 << 20
"""On a virtual disk blocks of 8 and 16 MiB were read at 2.7 GB/s, of 4 MiB at 1.7; written at 2.0 and 1.9."""
IN_FLIGHT = 4
"""Blocks on their way at once; two and four gave one rate."""

_WORTH_SPLITTING = 256 << 10  # smaller pieces are copied together: a request to the disk costs more than the copy
_ROOM_AHEAD = 64 << 20


def address(view: memoryview) -> int:
    """Where a buffer lies in memory."""
    return int(np.frombuffer(view, dtype=np.uint8).ctypes.data)


def write_all(calls: Calls, descriptor: int, data: memoryview, offset: int) -> None:
    """Write a buffer at a place; the system may take it in several goes."""
    done = 0
    while done < len(data):
        done += calls.pwrite(descriptor, data[done:], offset + done)


def read_some(calls: Calls, descriptor: int, into: memoryview, offset: int) -> int:
    """Fill a buffer from a place as far as the file goes; return how far that was."""
    done = 0
    while done < len(into):
        got = calls.preadv(descriptor, [into[done:]], offset + done)
        if not got:
            break
        done += got
    return done


class _AlignedBuffers:
    """Page-aligned blocks that are lent out and come back; `borrow` waits for one when all are out."""

    def __init__(self, most: int) -> None:
        self._idle: queue.Queue[memoryview] = queue.Queue()
        self._unmade = most

    def borrow(self) -> memoryview:
        if self._idle.empty() and self._unmade:
            self._unmade -= 1
            return memoryview(mmap.mmap(-1, BLOCK))
        return self._idle.get()

    def give_back(self, buffer: memoryview) -> None:
        self._idle.put(buffer)


class DirectWriter:
    """One file written in aligned blocks: `add` its parts in order, then `finish`."""

    def __init__(self, calls: Calls, descriptor: int, allocate: Callable[[int, int], None], total: int | None) -> None:
        """`allocate(offset, length)` takes room on the disk; `total` is the length of the file where it is known."""
        self._calls = calls
        self._descriptor = descriptor
        self._allocate = allocate
        self._allocated = 0
        self._pool = ThreadPoolExecutor(IN_FLIGHT, thread_name_prefix="danlu-write")
        self._pending: deque[Future[None]] = deque()
        self._buffers = _AlignedBuffers(IN_FLIGHT + 2)
        self._buffer: memoryview | None = None
        self._filled = 0
        self._position = 0
        if total:
            self._reserve(-(-total // ALIGNMENT) * ALIGNMENT)

    def write(self, parts: Iterable[memoryview]) -> int:
        """Write all parts and return how many bytes they were."""
        try:
            for part in parts:
                self._add(part)
            return self._finish()
        finally:
            self._pool.shutdown(cancel_futures=True)

    def _add(self, part: memoryview) -> None:
        while part:
            to_border = -self._filled % ALIGNMENT
            straight = len(part) - to_border >= _WORTH_SPLITTING and (address(part) + to_border) % ALIGNMENT == 0
            if straight and not self._filled:
                taken = min(len(part) // ALIGNMENT * ALIGNMENT, BLOCK)
                self._submit(part[:taken], None)
            else:
                taken = self._copy(part[:to_border] if straight and to_border else part)
                if self._filled == BLOCK or (straight and not self._filled % ALIGNMENT):
                    self._flush()
            part = part[taken:]

    def _copy(self, part: memoryview) -> int:
        if self._buffer is None:
            self._buffer = self._buffers.borrow()
        taken = min(len(part), BLOCK - self._filled)
        self._buffer[self._filled : self._filled + taken] = part[:taken]
        self._filled += taken
        return taken

    def _flush(self) -> None:
        assert self._buffer is not None
        buffer, length = self._buffer, self._filled
        self._buffer, self._filled = None, 0
        self._submit(buffer[:length], buffer)

    def _submit(self, block: memoryview, lent: memoryview | None) -> None:
        if self._position + len(block) > self._allocated:
            self._reserve(self._position + len(block) + _ROOM_AHEAD)
        while len(self._pending) >= 2 * IN_FLIGHT or (self._pending and self._pending[0].done()):
            self._pending.popleft().result()
        self._pending.append(self._pool.submit(self._write_block, block, self._position, lent))
        self._position += len(block)

    def _write_block(self, block: memoryview, offset: int, lent: memoryview | None) -> None:
        try:
            write_all(self._calls, self._descriptor, block, offset)
        finally:
            if lent is not None:
                self._buffers.give_back(lent)

    def _reserve(self, end: int) -> None:
        if end > self._allocated:
            self._allocate(self._allocated, end - self._allocated)
            self._allocated = end

    def _finish(self) -> int:
        size = self._position + self._filled
        if self._buffer is not None:
            # The last block must be whole too; what is too much is cut off.
            padding = -self._filled % ALIGNMENT
            self._buffer[self._filled : self._filled + padding] = bytes(padding)
            self._filled += padding
            self._flush()
        while self._pending:
            self._pending.popleft().result()
        self._calls.ftruncate(self._descriptor, size)
        return size


def read_direct(calls: Calls, descriptor: int, offset: int, into: memoryview) -> int:
    """Fill `into` from `offset` of a file opened with O_DIRECT; return how many bytes the file had."""
    end = offset + len(into)
    buffers = _AlignedBuffers(IN_FLIGHT)
    same_border = address(into) % ALIGNMENT == offset % ALIGNMENT

    def read_block(start: int) -> int:
        stop = min(start + BLOCK, end)
        inside = max(start, offset)
        target = into[inside - offset : stop - offset]
        if same_border and inside == start and stop % ALIGNMENT == 0:
            return read_some(calls, descriptor, target, start)
        buffer = buffers.borrow()
        try:
            whole = -(-(stop - start) // ALIGNMENT) * ALIGNMENT
            got = min(read_some(calls, descriptor, buffer[:whole], start), stop - start)
            useful = max(0, got - (inside - start))
            target[:useful] = buffer[inside - start : inside - start + useful]
            return useful
        finally:
            buffers.give_back(buffer)

    with ThreadPoolExecutor(IN_FLIGHT, thread_name_prefix="danlu-read") as pool:
        return sum(pool.map(read_block, range(offset // ALIGNMENT * ALIGNMENT, end, BLOCK)))
