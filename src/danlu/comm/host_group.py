"""Collectives of ranks on one host, through memory that they share.

Each rank copies what others need into its slot, all wait for each other, and each reads what it needs: a byte is copied
twice, where a socket copies it four times and wakes a thread on each side. Tensors beyond a slot go in turns, on two
sets of slots: what is read in one turn is not written before the one after the next, so one barrier a turn suffices.

Sums are taken in the order of the ranks, in float32 for shorter formats of more than two ranks, and once for all ranks.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Self

import numpy as np
import torch
from torch import Tensor

from danlu.comm.own_collectives import Operation, Reduction
from danlu.comm.shared_memory import HostPeerError, SharedMemory
from danlu.torch_compat import Store

SLOT_BYTES = 1 << 20
"""What a rank can hand over in one turn."""
_SMALL_BYTES = 1 << 14
"""All-reduces up to this size are summed by every rank, which saves a barrier."""
_ALIGNMENT = 64
_SETS = 2
_OPERATIONS = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast", "barrier")


class HostGroup:
    """Collectives on tensors of the CPU; every rank calls the same ones in the same order."""

    def __init__(self, memory: SharedMemory) -> None:
        self.memory = memory
        self.index, self.size = memory.index, memory.size
        size, header = self.size, 8 * (2 + self.size)
        self._headers = np.frombuffer(memory.payload, np.int64, _SETS * size * header // 8).reshape(_SETS, size, -1)
        start = _aligned(_SETS * size * header)
        slots = torch.frombuffer(memory.payload, dtype=torch.uint8, offset=start, count=_SETS * size * SLOT_BYTES)
        self._slots = slots.view(_SETS, size, SLOT_BYTES)
        self._turn = 0

    @classmethod
    def join(cls, store: Store, index: int, size: int, timeout: timedelta) -> Self:
        """Become the `index`-th rank of those that meet at a store; `SharedMemoryError` on all of them or on none."""
        payload = _aligned(_SETS * size * 8 * (2 + size)) + _SETS * size * SLOT_BYTES
        return cls(SharedMemory.share(store, index, size, payload, timeout))

    def answers(self, operation: Operation, size: int) -> bool:
        """All are answered."""
        return True

    def interrupt(self) -> None:
        """End the collectives in which all ranks wait, and all later ones, with an error; from any thread."""
        self.memory.interrupt()

    def close(self) -> None:
        """No collective will be called any more."""
        self.memory.close()

    def barrier(self) -> None:
        """Wait until every rank is here."""
        with self._operation("barrier", 0):
            pass

    def all_gather(self, output: Tensor, given: Tensor) -> None:
        """Write the tensors of all ranks, one after the other, to `output`."""
        parts, mine = _bytes(output).view(self.size, -1), _bytes(given)
        parts[self.index].copy_(mine)
        with self._operation("all_gather", mine.numel()):
            for start in _starts(mine.numel(), SLOT_BYTES):
                slots = self._slots[self._turn % _SETS]
                chunk = mine[start : start + SLOT_BYTES]
                slots[self.index, : chunk.numel()].copy_(chunk)
                self._pass_turn()
                for peer in self._peers():
                    parts[peer, start : start + chunk.numel()].copy_(slots[peer, : chunk.numel()])

    def broadcast(self, tensor: Tensor, source: int) -> None:
        """Give all ranks the tensor of the `source`-th, in place."""
        content, most = _bytes(tensor), self.size * SLOT_BYTES
        with self._operation("broadcast", content.numel()):
            for start in _starts(content.numel(), most):
                slots = self._slots[self._turn % _SETS].view(-1)
                chunk = content[start : start + most]
                if self.index == source:
                    slots[: chunk.numel()].copy_(chunk)
                self._pass_turn()
                if self.index != source:
                    chunk.copy_(slots[: chunk.numel()])

    def reduce_scatter(self, output: Tensor, given: Tensor, reduction: Reduction = "sum") -> None:
        """Reduce over all ranks, and write this rank's part of as many equal ones to `output`."""
        parts, mine = given.reshape(self.size, -1), output.view(-1)
        most = SLOT_BYTES // self.size // _ALIGNMENT * _ALIGNMENT // given.element_size()
        with self._operation("reduce_scatter", parts.numel() * given.element_size()):
            for start in _starts(mine.numel(), most):
                count = min(most, mine.numel() - start)
                slots = self._slots[self._turn % _SETS].view(given.dtype)[:, : self.size * count]
                slots = slots.view(self.size, self.size, count)
                given_here, place = parts[:, start : start + count], mine[start : start + count]
                if self.size == 2 and reduction == "sum":  # what stays here need not pass the memory
                    slots[self.index, 1 - self.index].copy_(given_here[1 - self.index])
                    self._pass_turn()
                    torch.add(given_here[self.index], slots[1 - self.index, self.index], out=place)
                else:
                    slots[self.index].copy_(given_here)
                    self._pass_turn()
                    _reduce(slots[:, self.index], reduction, place)

    def all_reduce(self, tensor: Tensor, reduction: Reduction = "sum") -> None:
        """Reduce a contiguous tensor over all ranks, in place."""
        flat = tensor.view(-1)
        most = SLOT_BYTES // tensor.element_size()
        is_small = flat.numel() * tensor.element_size() <= _SMALL_BYTES
        with self._operation("all_reduce", flat.numel() * tensor.element_size()):
            for start in _starts(flat.numel(), most):
                chunk = flat[start : start + most]
                slots = self._slots[self._turn % _SETS].view(tensor.dtype)[:, : chunk.numel()]
                slots[self.index].copy_(chunk)
                self._pass_turn()
                if is_small:
                    _reduce(slots, reduction, chunk)
                    continue
                share = -(-chunk.numel() // self.size)
                shares, places = slots.split(share, 1), chunk.split(share)
                if self.index < len(shares):
                    _reduce(shares[self.index], reduction, places[self.index])
                    # Its share of its own slot, which nobody else reads before the second barrier.
                    shares[self.index][self.index].copy_(places[self.index])
                self.memory.barrier()
                for peer in self._peers():
                    if peer < len(shares):
                        places[peer].copy_(shares[peer][peer])

    def all_to_all(self, output: Tensor, given: Tensor, received: Sequence[int], sent: Sequence[int]) -> None:
        """Send `sent[r]` rows to the r-th rank, in order; `received[r]` come from it. Neither: as many to each."""
        even = [given.shape[0] // self.size] * self.size
        received, sent = received or even, sent or even
        row = given.nbytes // given.shape[0] if given.numel() else output.nbytes // max(output.shape[0], 1)
        outgoing = _bytes(given).split([rows * row for rows in sent])
        incoming = _bytes(output).split([rows * row for rows in received])
        incoming[self.index].copy_(outgoing[self.index])
        most = SLOT_BYTES // self.size // _ALIGNMENT * _ALIGNMENT
        with self._operation("all_to_all", None, [part.numel() for part in outgoing]):
            turn, turns = 0, 1
            while turn < turns:
                slots = self._slots[self._turn % _SETS, :, : most * self.size].view(self.size, self.size, most)
                for peer in self._peers():
                    chunk = outgoing[peer][turn * most : (turn + 1) * most]
                    slots[self.index, peer, : chunk.numel()].copy_(chunk)
                headers = self._headers[self._turn % _SETS]
                self._pass_turn()
                if turn == 0:
                    sizes = headers[:, 2:]
                    self._check_sizes(sizes[:, self.index], [part.numel() for part in incoming])
                    turns = max(1, -(-int((sizes - np.diag(np.diag(sizes))).max()) // most))
                for peer in self._peers():
                    chunk = incoming[peer][turn * most : (turn + 1) * most]
                    chunk.copy_(slots[peer, self.index, : chunk.numel()])
                turn += 1

    def _peers(self) -> Iterator[int]:
        """The other ranks, beginning after this one: not all read from the same one at once."""
        return ((self.index + step) % self.size for step in range(1, self.size))

    @contextmanager
    def _operation(self, name: str, size: int | None, sizes: Sequence[int] = ()) -> Iterator[None]:
        """Say to the others what this rank does, which they compare at the end of the first turn."""
        header = self._headers[self._turn % _SETS, self.index]
        header[0], header[1] = _OPERATIONS.index(name), -1 if size is None else size
        header[2 : 2 + len(sizes)] = sizes
        self._first_turn = self._turn
        with torch.no_grad():
            yield
        if self._turn == self._first_turn:
            self._pass_turn()

    def _pass_turn(self) -> None:
        self.memory.barrier()
        if self._turn == self._first_turn:
            headers = self._headers[self._turn % _SETS, :, :2]
            mine = headers[self.index]
            if (headers != mine).any():
                peer = int((headers != mine).any(1).argmax())
                self.memory.interrupt()
                raise HostPeerError(
                    f"ranks do different things: {_describe(mine)} on rank {self.index} of this group, "
                    f"and {_describe(headers[peer])} on rank {peer}"
                )
        self._turn += 1

    def _check_sizes(self, found: np.ndarray, expected: Sequence[int]) -> None:
        for peer, (size, wanted) in enumerate(zip(found.tolist(), expected, strict=True)):
            if size != wanted:
                self.memory.interrupt()
                raise HostPeerError(
                    f"rank {peer} of this group sends {size} bytes to rank {self.index} in an all-to-all, "
                    f"which expects {wanted}"
                )


def _reduce(slots: Tensor, reduction: Reduction, output: Tensor) -> None:
    """Reduce over the first dimension."""
    if reduction == "sum" and slots.shape[0] == 2:
        torch.add(slots[0], slots[1], out=output)
    elif reduction == "sum":
        torch.sum(slots, 0, dtype=output.dtype, out=output)
    else:
        (torch.amax if reduction == "max" else torch.amin)(slots, 0, out=output)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)


def _starts(size: int, most: int) -> range:
    return range(0, size, most)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _describe(header: np.ndarray) -> str:
    return f"{_OPERATIONS[int(header[0])]} of {int(header[1])} bytes"
