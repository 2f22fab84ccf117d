"""Collectives of MPI in the place of torch's, for machines whose network only MPI drives well.

    mpirun -n 8 python train.py    # or srun --mpi=pmix

    world = join_mpi()             # in train.py, before anything else of torch.distributed

Torch's own groups stay for what is not a collective: sends of pipelines, and the store through which ranks find each
other, both over TCP. MPI cannot be interrupted and loses all ranks with one, so that a run recovers by a restart.
"""

import secrets
import socket
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from danlu.comm.own_collectives import Operation, Reduction
from danlu.comm.rendezvous import TIMEOUT, RankInfo
from danlu.comm.store_server import StoreServer
from danlu.comm.token_store import TokenStore
from danlu.comm.world import CPU, World

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

_WIDER = {torch.bfloat16: torch.float32, torch.float16: torch.float32}
"""Types that MPI cannot add up, and those in which they are added up instead."""


def join_mpi(device: torch.device = CPU) -> World:
    """Become a rank of the processes that `mpirun` or `srun` started, with MPI's collectives."""
    try:
        from mpi4py import MPI  # its import starts MPI
    except ModuleNotFoundError:
        raise ModuleNotFoundError("join_mpi needs mpi4py: pip install 'danlu[mpi]'", name="mpi4py") from None
    everyone = MPI.COMM_WORLD
    _abort_on_error(everyone)
    rank, size = everyone.Get_rank(), everyone.Get_size()
    on_host = everyone.Split_type(MPI.COMM_TYPE_SHARED)
    local_rank, is_alone = on_host.Get_rank(), on_host.Get_size() == size
    on_host.Free()
    token = everyone.bcast(secrets.token_bytes(32) if rank == 0 else None)
    server = StoreServer(_listen("127.0.0.1" if is_alone else _address()), token) if rank == 0 else None
    endpoint = everyone.bcast(server.address if server else None)
    store = TokenStore(endpoint, token, 0, TIMEOUT, server)
    return World.join(RankInfo(rank, size, local_rank), "gloo", store, device, answer=MpiGroups(everyone))


class MpiGroups:
    """Makes the collectives of a world's groups."""

    def __init__(self, everyone: "Intracomm") -> None:
        """`everyone` has the ranks of the world, in order."""
        self._everyone = everyone

    def __call__(self, members: Sequence[int]) -> "MpiGroup":
        """The collectives of some ranks, which all of them make together."""
        return MpiGroup(self._everyone.Create_group(self._everyone.Get_group().Incl(list(members))))


class MpiGroup:
    """Collectives on tensors of the CPU; every rank calls the same ones in the same order."""

    def __init__(self, communicator: "Intracomm") -> None:
        self._communicator = communicator
        self.size: int = communicator.Get_size()

    def all_reduce(self, tensor: Tensor, reduction: Reduction) -> None:
        """Reduce a tensor over all ranks, in place."""
        wide = tensor.to(_WIDER.get(tensor.dtype, tensor.dtype))
        no_numbers = wide.isnan().to(torch.uint8) if reduction != "sum" and wide.is_floating_point() else None
        self._communicator.Allreduce(_in_place(), _elements(wide), _operation(reduction))
        if no_numbers is not None:  # which MPI's maximum and minimum may lose
            self._communicator.Allreduce(_in_place(), _elements(no_numbers), _operation("max"))
            wide.masked_fill_(no_numbers.bool(), torch.nan)
        if wide is not tensor:
            tensor.copy_(wide)

    def reduce_scatter(self, output: Tensor, given: Tensor, reduction: Reduction) -> None:
        """Reduce over all ranks, and write this rank's part of as many equal ones to `output`."""
        if reduction != "sum":
            whole = given.clone()
            self.all_reduce(whole, reduction)
            output.view(-1).copy_(whole.view(self.size, -1)[self._communicator.Get_rank()])
            return
        wide = given.to(_WIDER.get(given.dtype, given.dtype))
        mine = output if wide is given else torch.empty_like(output, dtype=wide.dtype)
        self._communicator.Reduce_scatter_block(_elements(wide), _elements(mine), _operation(reduction))
        if mine is not output:
            output.copy_(mine)

    def all_gather(self, output: Tensor, given: Tensor) -> None:
        """Write the tensors of all ranks, one after the other, to `output`."""
        self._communicator.Allgather(_bytes(given), _bytes(output))

    def all_to_all(self, output: Tensor, given: Tensor, received: Sequence[int], sent: Sequence[int]) -> None:
        """Send `sent[r]` rows to the r-th rank, in order; `received[r]` come from it. Neither: as many to each."""
        row = given.nbytes // given.shape[0] if given.numel() else output.nbytes // max(output.shape[0], 1)
        even = [given.shape[0] // self.size] * self.size
        outgoing, incoming = ([rows * row for rows in counts or even] for counts in (sent, received))
        self._communicator.Alltoallv((_bytes(given), outgoing), (_bytes(output), incoming))

    def broadcast(self, tensor: Tensor, source: int) -> None:
        """Give all ranks the tensor of the `source`-th, in place."""
        self._communicator.Bcast(_bytes(tensor), source)

    def barrier(self) -> None:
        """Wait until every rank is here."""
        self._communicator.Barrier()

    def answers(self, operation: Operation, size: int) -> bool:
        """All are answered."""
        return True

    def interrupt(self) -> None:
        """MPI cannot be interrupted: it ends all ranks when one is lost."""

    def close(self) -> None:
        """No collective will be called any more."""
        self._communicator.Free()


def _abort_on_error(everyone: "Intracomm") -> None:
    """End all ranks when an exception ends this one: at its end it would wait for the others, and they for it."""
    told = sys.excepthook

    def tell_and_abort(*error: Any) -> None:
        told(*error)
        sys.stderr.flush()
        everyone.Abort(1)

    sys.excepthook = tell_and_abort


def _operation(reduction: Reduction) -> Any:
    from mpi4py import MPI

    return {"sum": MPI.SUM, "max": MPI.MAX, "min": MPI.MIN}[reduction]


def _in_place() -> Any:
    from mpi4py import MPI

    return MPI.IN_PLACE


def _elements(tensor: Tensor) -> np.ndarray[Any, Any]:
    return tensor.detach().view(-1).numpy()


def _bytes(tensor: Tensor) -> np.ndarray[Any, Any]:
    return tensor.detach().view(-1).view(torch.uint8).numpy()


def _address() -> str:
    """By which other hosts reach this one: of the interface that leads out, or of its name."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as out:
        try:
            out.connect(("192.0.2.1", 9))  # sends nothing: an address that nobody has (RFC 5737)
            return str(out.getsockname()[0])
        except OSError:
            return socket.gethostbyname(socket.gethostname())


def _listen(address: str) -> socket.socket:
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.bind((address, 0))
    listener.listen(socket.SOMAXCONN)
    return listener
