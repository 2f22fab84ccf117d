"""Small agreements between the ranks of a run: a few numbers, a collective each."""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist


class Ranks:
    """All ranks of this process's world, or this process alone where there is none."""

    def __init__(self, device: torch.device) -> None:
        """`device` is where the collectives of this world work."""
        self.device = device

    @property
    def rank(self) -> int:
        """This one's number."""
        return dist.get_rank() if dist.is_initialized() else 0

    @property
    def world(self) -> int:
        """How many there are."""
        return dist.get_world_size() if dist.is_initialized() else 1

    def from_first(self, answer: Callable[[], int]) -> int:
        """What rank 0 answers, on every rank."""
        told = torch.tensor(answer() if self.rank == 0 else 0, device=self.device)
        if self.world > 1:
            dist.broadcast(told, src=0)
        return int(told)

    def any(self, mine: bool) -> bool:
        """Whether it is so on any rank."""
        return self.any_of([mine])[0]

    def any_of(self, mine: Sequence[bool]) -> list[bool]:
        """For each of several, whether it is so on any rank."""
        flags = torch.tensor(mine, dtype=torch.int32, device=self.device)
        if self.world > 1:
            dist.all_reduce(flags, dist.ReduceOp.MAX)
        return [bool(flag) for flag in flags.tolist()]

    def sums(self, words: Sequence[int]) -> list[int]:
        """Sums over all ranks, modulo 2^64."""
        total = torch.tensor([word - 2**64 if word >= 2**63 else word for word in words], dtype=torch.int64)
        total = total.to(self.device)
        if self.world > 1:
            dist.all_reduce(total)
        return [int(word) % 2**64 for word in total.tolist()]

    def gather(self, words: Sequence[int]) -> list[list[int]]:
        """The words of every rank, by rank; once a save, never a step."""
        if self.world == 1:
            return [list(words)]
        mine = torch.tensor(words, dtype=torch.int64, device=self.device)
        everyone = torch.empty(self.world * len(words), dtype=torch.int64, device=self.device)
        dist.all_gather_single(everyone, mine)
        found: list[list[int]] = everyone.reshape(-1, len(words)).tolist()
        return found
