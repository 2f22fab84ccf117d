"""Orthogonalization of matrices by Newton–Schulz iterations (Muon): FLOPs, and which rank does which matrix."""

from dataclasses import dataclass
from functools import lru_cache
from heapq import heapify, heapreplace
from typing import Literal, NamedTuple

from danlu.ops.layer_shard import Matmul
from danlu.spec.model import Model
from danlu.spec.parameters import is_hidden_matrix, layer_parameters, mtp_parameters, parameter_settings
from danlu.spec.recipe import OptimizerConfig

ROUND_ELEMENTS = 1 << 24
"""Elements that a rank assembles at once, unless a single matrix has more: 64 MiB in fp32."""


def matmuls(rows: int, columns: int) -> tuple[Matmul, ...]:
    """Of one iteration on one matrix: the Gram matrix of its shorter side, its square, and that by the matrix."""
    short, long = sorted((rows, columns))
    return Matmul(short, short, long), Matmul(short, short, short), Matmul(short, long, short)


def newton_schulz_flops(rows: int, columns: int, steps: int) -> float:
    """FLOPs of `steps` iterations on one matrix."""
    return steps * sum(matmul.flops for matmul in matmuls(rows, columns))


class MatrixKind(NamedTuple):
    """Matrices of a layer that are alike."""

    rows: int
    columns: int
    experts: int = 0
    """How many routed experts have one; 0 for a matrix that is no expert's."""

    @property
    def elements(self) -> int:
        """Of all of them."""
        return self.rows * self.columns * max(1, self.experts)


class MuonTraits(NamedTuple):
    """What Muon costs depends on: its iterations, and which matrices of a layer are its own."""

    steps: int
    dtype: Literal["bf16", "fp32"]
    dense: tuple[MatrixKind, ...]
    """Of a layer without experts."""
    moe: tuple[MatrixKind, ...]
    """Of a layer with experts."""
    mtp: tuple[MatrixKind, ...] = ()
    """Of a module of multi-token prediction, beside those of its layer."""

    @property
    def element_bytes(self) -> int:
        """Bytes of an element that is sent or orthogonalized."""
        return 2 if self.dtype == "bf16" else 4


def muon_traits(model: Model, config: OptimizerConfig) -> MuonTraits | None:
    """The traits of a recipe's Muon; None without it.

    Groups that match some layers and not others count as they do in the first layer of a kind.
    """
    if not config.has_muon:
        return None
    kinds: dict[bool, list[MatrixKind]] = {False: [], True: []}
    for moe, found in kinds.items():
        first = next((layer for layer in range(model.layers) if model.is_moe_layer(layer) == moe), None)
        for name, shape in layer_parameters(model, moe) if first is not None else ():
            full = f"blocks.{first}.{name}"
            settings = parameter_settings(full, len(shape), is_hidden_matrix(full, shape), config)
            if settings.kind == "muon":
                found.append(MatrixKind(shape[-2], shape[-1], shape[0] if len(shape) == 3 else 0))
    joined = [
        MatrixKind(*shape)
        for name, shape in (mtp_parameters(model) if model.mtp else ())
        if not name.startswith("block.")
        and parameter_settings(f"mtp.0.{name}", len(shape), len(shape) == 2, config).kind == "muon"
    ]
    return MuonTraits(
        config.newton_schulz_steps,
        config.newton_schulz_dtype,
        tuple(kinds[False]),
        tuple(kinds[True]),
        tuple(joined),
    )


@dataclass(frozen=True)
class WorkDivision:
    """Who works on which of several matrices, and in which round."""

    owner: tuple[int, ...]
    """The rank of every matrix."""
    rounds: tuple[tuple[int, ...], ...]
    """The matrices of every round, in ascending order; no rank has more than `round_elements` in one, or one matrix."""


@lru_cache(maxsize=1024)
def divide_work(
    shapes: tuple[tuple[int, int], ...], ranks: int, steps: int, round_elements: int = ROUND_ELEMENTS
) -> WorkDivision:
    """Divide matrices over ranks by the FLOPs of their orthogonalization: the longest first, to who has least.

    Every rank computes the same division from the shapes alone, so that none has to be told.
    """
    costs = [newton_schulz_flops(rows, columns, steps) for rows, columns in shapes]
    loads = [(0.0, rank) for rank in range(ranks)]
    heapify(loads)
    owner, round_of = [0] * len(shapes), [0] * len(shapes)
    filled: dict[int, tuple[int, int]] = {}
    for matrix in sorted(range(len(shapes)), key=lambda matrix: -costs[matrix]):
        load, rank = loads[0]
        heapreplace(loads, (load + costs[matrix], rank))
        elements = shapes[matrix][0] * shapes[matrix][1]
        at, held = filled.get(rank, (0, 0))
        if held and held + elements > round_elements:
            at, held = at + 1, 0
        filled[rank] = at, held + elements
        owner[matrix], round_of[matrix] = rank, at
    rounds: list[list[int]] = [[] for _ in range(max(round_of, default=-1) + 1)]
    for matrix, at in enumerate(round_of):
        rounds[at].append(matrix)
    return WorkDivision(tuple(owner), tuple(map(tuple, rounds)))
