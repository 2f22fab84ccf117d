"""One rank of the tests of hierarchical collectives: drawn cases, each against what numpy computes from all inputs.

Every rank draws the same cases and all ranks' inputs, so that each can compute what it must receive. Sums are of small
whole numbers, which every type holds exactly: they must be equal whatever order they are taken in.
"""

import json
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from danlu.comm import hierarchical
from danlu.comm.level_groups import LevelGroups, join_level_groups
from danlu.comm.rendezvous import RankInfo, rendezvous
from danlu.comm.world import World

SHAPES: dict[int, list[tuple[int, ...]]] = {6: [(6,), (3, 2), (2, 3)], 8: [(8,), (2, 4), (4, 2), (2, 2, 2), (2, 1, 4)]}
"""For every number of ranks, levels that they are laid out on."""
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.int32, torch.uint8]
Draw = np.random.Generator


def inputs(draw: Draw, ranks: int, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """The input of every rank."""
    return draw.integers(0, 4, (ranks, *shape))


def as_tensor(values: np.ndarray[Any, Any], dtype: torch.dtype) -> Tensor:
    return torch.tensor(values, dtype=dtype)  # a copy: the inputs stay what they were


def same(found: Tensor, expected: np.ndarray[Any, Any], dtype: torch.dtype) -> None:
    assert found.dtype == dtype and tuple(found.shape) == expected.shape, (found.dtype, found.shape, expected.shape)
    assert np.array_equal(found.to(torch.float64).numpy(), expected.astype(np.float64))


def draw_shape(draw: Draw) -> tuple[int, ...]:
    return tuple(int(size) for size in draw.integers(0, 7, draw.integers(1, 4)))


def all_reduce(draw: Draw, over: LevelGroups, dtype: torch.dtype) -> None:
    given, pieces = inputs(draw, over.size, draw_shape(draw)), int(draw.integers(1, 7))
    tensor = as_tensor(given[over.index], dtype)
    hierarchical.all_reduce(tensor, over, pieces)
    same(tensor, given.sum(0), dtype)


def reduce_scatter(draw: Draw, over: LevelGroups, dtype: torch.dtype) -> None:
    rows, *rest = draw_shape(draw)
    given, pieces = inputs(draw, over.size, (rows * over.size, *rest)), int(draw.integers(1, 7))
    found = hierarchical.reduce_scatter(as_tensor(given[over.index], dtype), over, pieces)
    same(found, given.sum(0)[over.index * rows : (over.index + 1) * rows], dtype)


def all_gather(draw: Draw, over: LevelGroups, dtype: torch.dtype) -> None:
    given, pieces = inputs(draw, over.size, draw_shape(draw)), int(draw.integers(1, 7))
    same(hierarchical.all_gather(as_tensor(given[over.index], dtype), over, pieces), given, dtype)


def broadcast(draw: Draw, over: LevelGroups, dtype: torch.dtype) -> None:
    given, source = inputs(draw, over.size, draw_shape(draw)), int(draw.integers(over.size))
    tensor = as_tensor(given[over.index], dtype)
    hierarchical.broadcast(tensor, over, source)
    same(tensor, given[source], dtype)


def all_to_all(draw: Draw, over: LevelGroups, dtype: torch.dtype) -> None:
    rows, *rest = draw_shape(draw)
    given = inputs(draw, over.size, (over.size, rows, *rest))
    sent = as_tensor(given[over.index], dtype).view(over.size * rows, *rest)
    pieces = int(draw.integers(1, 7))
    same(hierarchical.all_to_all(sent, over, pieces), given[:, over.index].reshape(over.size * rows, *rest), dtype)


def all_to_all_v(draw: Draw, over: LevelGroups, dtype: torch.dtype) -> None:
    size, width = over.size, int(draw.integers(1, 6))
    counts = draw.integers(0, 5, (size, size)) * draw.integers(0, 2, (size, size))
    rows = [inputs(draw, int(count.sum()), (width,)) for count in counts]
    starts = np.cumsum(counts, axis=1) - counts
    expected = [rows[source][starts[source, over.index] :][: counts[source, over.index]] for source in range(size)]
    found, found_counts = hierarchical.all_to_all_v(
        as_tensor(rows[over.index], dtype), torch.from_numpy(counts[over.index]), over
    )
    assert found_counts.tolist() == counts[:, over.index].tolist()
    same(found, np.concatenate(expected), dtype)


CASES: list[Callable[[Draw, LevelGroups, torch.dtype], None]] = [
    all_reduce, reduce_scatter, all_gather, broadcast, all_to_all, all_to_all_v,
]  # fmt: skip


def main() -> None:
    rank, size, port, folder, cases = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4]), sys.argv[5]
    place = RankInfo(rank, size, rank, f"127.0.0.1:{port}", bytes(32))
    world = World.join(place, "gloo", rendezvous(place), timeout=timedelta(seconds=60))
    assert world.store is not None
    layouts = []
    for shape in SHAPES[size]:
        name = "×".join(map(str, shape))
        layouts.append((shape, world.level_groups(range(size), shape, name)))
        layouts.append((shape, join_level_groups(world.store, rank, shape, f"{name} alone")))
    draw, told, at = np.random.default_rng(7), {"cases": 0, "failed": ""}, ""
    try:
        for number in range(int(cases)):
            shape, over = layouts[draw.integers(len(layouts))]
            case, dtype = CASES[number % len(CASES)], DTYPES[draw.integers(len(DTYPES))]
            at = f"case {number}: {case.__name__} of {dtype} on {shape}"
            case(draw, over, dtype)
            told["cases"] = number + 1
    except Exception:
        told["failed"] = f"{at}\n{traceback.format_exc()}"
    (folder / f"{size}-{rank}.json").write_text(json.dumps(told))
    world.barrier() if not told["failed"] else None
    world.shutdown()


if __name__ == "__main__":
    main()
