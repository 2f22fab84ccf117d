"""Whole matrices from their shards: each rank of a group assembles its share of them, and sends the results back."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from danlu.ops.newton_schulz import WorkDivision, divide_work
from danlu.torch_compat import StridedShard, all_gather_single, all_to_all_single, wait_tensor

AxisRole = Literal["gathered", "kept", "replicated"]
"""What an axis of a parameter's mesh means for its matrices: it shards each of them, it shards the stack of them (so
that a rank has whole ones of its own), or it has copies of the same shards."""
Shape = tuple[int, int]


@dataclass(frozen=True)
class _AxisShard:
    """How one axis shards a matrix."""

    dim: int
    full: int
    """Size of the dim with the shards of all ranks of the axis."""
    piece: int
    """Size of a shard; the last ones may be shorter and are padded to it when they are sent."""
    local: int
    """Size of this rank's."""


@dataclass(frozen=True)
class Matrix:
    """One matrix of a parameter; a parameter of three dims is a stack of them."""

    parameter: int
    """Position among the parameters."""
    index: int
    """Position among the matrices of the stack that this rank holds shards of."""
    shape: Shape
    local: Shape
    """Shape of this rank's shard."""
    shards: dict[int, _AxisShard]
    """By axis of the mesh, the gathered ones alone."""


class WholeMatrices:
    """The matrices of some parameters, divided over the ranks that hold their shards and copies.

    A parameter is a tensor, or a DTensor of any mesh, of two dims or of three (a stack of matrices, such as experts).
    Ranks that hold the same shards (`replicate`) divide the work too. A round assembles at most `ROUND_ELEMENTS`
    elements per rank, or one matrix, and sends as many.
    """

    def __init__(self, parameters: Sequence[Tensor], steps: int, dtype: torch.dtype) -> None:
        """`steps` of Newton–Schulz decide what a matrix costs, and so who works on it; `dtype` is what is sent."""
        groups: dict[tuple[DeviceMesh | None, tuple[AxisRole, ...]], list[Matrix]] = {}
        for position, parameter in enumerate(parameters):
            mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
            groups.setdefault((mesh, _roles(parameter)), []).extend(_matrices(position, parameter))
        nothing = torch.empty(0, dtype=dtype, device=parameters[0].device if parameters else None)
        self._groups = [
            _ExchangeGroup(mesh, roles, matrices, steps, nothing) for (mesh, roles), matrices in groups.items()
        ]

    def apply(
        self,
        read: Callable[[Matrix], Tensor],
        function: Callable[[Tensor], Tensor],
        write: Callable[[Matrix, Tensor], None],
    ) -> None:
        """Apply a function to every matrix; all ranks that share parameters call this together.

        `read` gives this rank's shard of a matrix, `function` maps a whole one to one of the same shape and dtype,
        `write` gets this rank's shard of the result.
        """
        for group in self._groups:
            for members in group.division.rounds:
                group.run_round(members, read, function, write)


def _roles(parameter: Tensor) -> tuple[AxisRole, ...]:
    if not isinstance(parameter, DTensor):
        return ()
    roles: list[AxisRole] = []
    for axis, placement in enumerate(parameter.placements):
        if not isinstance(placement, Shard | StridedShard) or parameter.device_mesh.size(axis) == 1:
            roles.append("replicated")
        else:
            roles.append("kept" if parameter.ndim == 3 and placement.dim == 0 else "gathered")
    return tuple(roles)


def _matrices(position: int, parameter: Tensor) -> Iterator[Matrix]:
    """The matrices of a parameter that this rank holds shards of."""
    stacked = parameter.ndim - 2
    if stacked not in (0, 1):
        raise ValueError(f"a parameter must be a matrix or a stack of them, but has shape {tuple(parameter.shape)}")
    size, shards = list(parameter.shape), {}
    if isinstance(parameter, DTensor):
        mesh, placements = parameter.device_mesh, parameter.placements
        coordinate = mesh.get_coordinate()
        assert coordinate is not None, "a rank holds parameters of its own meshes alone"
        # The axis that sharded last is strided, if two shard one dim: in that order sizes follow from each other.
        for axis in sorted(range(mesh.ndim), key=lambda axis: isinstance(placements[axis], StridedShard)):
            placement = placements[axis]
            if isinstance(placement, Shard | StridedShard) and mesh.size(axis) > 1:
                dim, full = placement.dim, size[placement.dim]
                piece = -(-full // mesh.size(axis))
                size[dim] = max(0, min(piece, full - coordinate[axis] * piece))
                if dim >= stacked:
                    shards[axis] = _AxisShard(dim - stacked, full, piece, size[dim])
    rows, columns = parameter.shape[stacked:]
    for index in range(size[0] if stacked else 1):
        yield Matrix(position, index, (rows, columns), (size[stacked], size[stacked + 1]), shards)


class _ExchangeGroup:
    """Matrices of one mesh whose axes mean the same for all of them; a matrix is named by its position here."""

    def __init__(
        self,
        mesh: DeviceMesh | None,
        roles: tuple[AxisRole, ...],
        matrices: list[Matrix],
        steps: int,
        nothing: Tensor,
    ) -> None:
        self.matrices, self.nothing = matrices, nothing
        coordinate = mesh.get_coordinate() if mesh is not None else None
        axes = [(axis, role) for axis, role in enumerate(roles) if mesh is not None and mesh.size(axis) > 1]
        # Copies first: the matrices of a round are spread over them, so what is shared in the end is even.
        self.axes: list[_ExchangeAxis] = []
        for wanted in ("replicated", "gathered"):
            for axis, role in axes:
                if role == wanted and mesh is not None and coordinate is not None:
                    self.axes.append(_ExchangeAxis(axis, mesh.size(axis), coordinate[axis], mesh.get_group(axis)))
        self.copies = [role for _, role in axes].count("replicated")
        sizes = [axis.ranks for axis in self.axes]
        self.division: WorkDivision = divide_work(tuple(matrix.shape for matrix in matrices), prod(sizes), steps)
        self.owners = [_unravel(owner, sizes) for owner in self.division.owner]
        """Coordinates along `axes` of the rank that works on a matrix."""

    def run_round(
        self,
        members: Sequence[int],
        read: Callable[[Matrix], Tensor],
        function: Callable[[Tensor], Tensor],
        write: Callable[[Matrix, Tensor], None],
    ) -> None:
        """Assemble the matrices of one round, apply the function, and send the results back."""
        pieces = {
            each: read(self.matrices[each]).to(self.nothing.dtype)
            for each in members
            if all(self._owns(each, axis) for axis in range(self.copies))
        }
        held: list[list[int]] = []
        for axis in range(self.copies, len(self.axes)):
            held.append(list(pieces))
            pieces = self._gather(axis, pieces)
        for each in pieces:
            pieces[each] = function(pieces[each])
        for axis in reversed(range(self.copies, len(self.axes))):
            pieces = self._scatter(axis, pieces, held.pop())
        for axis in reversed(range(self.copies)):
            sharing = [each for each in members if all(self._owns(each, outer) for outer in range(axis))]
            pieces = self._share(axis, pieces, sharing)
        for each, piece in pieces.items():
            write(self.matrices[each], piece)

    def _owns(self, each: int, axis: int) -> bool:
        return self.owners[each][axis] == self.axes[axis].coordinate

    def _by_owner(self, axis: int, members: Iterable[int]) -> list[list[int]]:
        """Matrices by their owner's coordinate along one axis."""
        owned: list[list[int]] = [[] for _ in range(self.axes[axis].ranks)]
        for each in members:
            owned[self.owners[each][axis]].append(each)
        return owned

    def _sent_shape(self, each: int, axis: int) -> Shape:
        """The shape of this rank's shard of a matrix as it is sent along an axis, after the axes before were joined."""
        matrix, shape = self.matrices[each], list(self.matrices[each].local)
        for earlier in self.axes[self.copies : axis]:
            shard = matrix.shards[earlier.mesh_axis]
            shape[shard.dim] = shard.full
        shard = matrix.shards[self.axes[axis].mesh_axis]
        shape[shard.dim] = shard.piece
        return shape[0], shape[1]

    def _gather(self, axis: int, pieces: dict[int, Tensor]) -> dict[int, Tensor]:
        """Send shards along an axis to the owners of their matrices; returns this rank's matrices, joined."""
        along, owned = self.axes[axis], self._by_owner(axis, pieces)
        splits = [sum(prod(self._sent_shape(each, axis)) for each in theirs) for theirs in owned]
        flat = [
            _pad(pieces[each], shard.dim, shard.piece).reshape(-1)
            for theirs in owned
            for each in theirs
            for shard in [self.matrices[each].shards[along.mesh_axis]]
        ]
        mine, arriving = owned[along.coordinate], splits[along.coordinate]
        received = along.exchange(torch.cat([self.nothing, *flat]), splits, [arriving] * along.ranks)
        shapes = [self._sent_shape(each, axis) for each in mine]
        blocks = received.view(along.ranks, arriving).split([prod(shape) for shape in shapes], dim=1)
        joined: dict[int, Tensor] = {}
        for each, shape, block in zip(mine, shapes, blocks, strict=True):
            shard = self.matrices[each].shards[along.mesh_axis]
            parts = block.unflatten(1, shape).movedim(0, shard.dim)
            joined[each] = parts.flatten(shard.dim, shard.dim + 1).narrow(shard.dim, 0, shard.full)
        return joined

    def _scatter(self, axis: int, wholes: dict[int, Tensor], members: Iterable[int]) -> dict[int, Tensor]:
        """The way back of `_gather`, into which this rank put shards of `members`."""
        along, owned = self.axes[axis], self._by_owner(axis, members)
        blocks = [self.nothing.expand(along.ranks, 0)]
        for each in owned[along.coordinate]:
            shard = self.matrices[each].shards[along.mesh_axis]
            padded = _pad(wholes[each], shard.dim, along.ranks * shard.piece)
            parts = padded.unflatten(shard.dim, (along.ranks, shard.piece)).movedim(shard.dim, 0)
            blocks.append(parts.flatten(1))
        leaving = torch.cat(blocks, dim=1)
        shapes = {each: self._sent_shape(each, axis) for theirs in owned for each in theirs}
        splits = [sum(prod(shapes[each]) for each in theirs) for theirs in owned]
        received = along.exchange(leaving.reshape(-1), [leaving.shape[1]] * along.ranks, splits)
        found: dict[int, Tensor] = {}
        for (each, shape), flat in zip(shapes.items(), received.split(list(map(prod, shapes.values()))), strict=True):
            shard = self.matrices[each].shards[along.mesh_axis]
            found[each] = flat.view(shape).narrow(shard.dim, 0, shard.local)
        return found

    def _share(self, axis: int, pieces: dict[int, Tensor], members: Iterable[int]) -> dict[int, Tensor]:
        """Give every rank along an axis, whose shards are the same, the results of the others."""
        along, owned = self.axes[axis], self._by_owner(axis, members)
        sizes = [[prod(self.matrices[each].local) for each in theirs] for theirs in owned]
        most = max(map(sum, sizes))
        flat = torch.cat([self.nothing, *(pieces[each].reshape(-1) for each in owned[along.coordinate])])
        everyone = flat.new_empty(along.ranks * most)
        all_gather_single(everyone, _pad(flat, 0, most), along.group)
        found: dict[int, Tensor] = {}
        for theirs, counts, row in zip(owned, sizes, everyone.view(along.ranks, most), strict=True):
            for each, piece in zip(theirs, row[: sum(counts)].split(counts), strict=True):
                found[each] = piece.view(self.matrices[each].local)
        return found


@dataclass(frozen=True)
class _ExchangeAxis:
    """An axis of a mesh along which shards or results are sent."""

    mesh_axis: int
    ranks: int
    coordinate: int
    group: ProcessGroup

    def exchange(self, flat: Tensor, sent: list[int], arriving: list[int]) -> Tensor:
        """All-to-all of consecutive parts of a tensor, one for each rank."""
        return wait_tensor(all_to_all_single(flat, arriving, sent, self.group))


def _unravel(owner: int, sizes: Sequence[int]) -> list[int]:
    """Coordinates of an owner; the first axis varies fastest."""
    found = []
    for size in sizes:
        owner, coordinate = divmod(owner, size)
        found.append(coordinate)
    return found


def _pad(tensor: Tensor, dim: int, size: int) -> Tensor:
    """The tensor with zeros up to `size` along a dim."""
    spare = size - tensor.shape[dim]
    if not spare:
        return tensor
    return F.pad(tensor, (*(0, 0) * (tensor.ndim - 1 - dim), 0, spare))
