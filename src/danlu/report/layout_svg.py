"""Pictures of a plan: ranks on the mesh, and the layers of every pipeline stage."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

import numpy as np

from danlu.comm.rank_layout import dense_ranks
from danlu.spec import Cluster, Plan
from danlu.spec.rank_placement import ranks_per_node

CELL_WIDTH, CELL_HEIGHT, GAP = 40, 26, 4
STAGE_WIDTH, STAGE_HEIGHT, STAGE_GAP = 76, 42, 12
LONE_STAGE_WIDTH = 132
"""Width of the only stage, which holds embedding and head."""
NODE_TINTS = 4
"""Adjacent nodes get different tints; after this many they repeat."""


def elide(count: int, most: int) -> list[int | None]:
    """The numbers below `count`; if more than `most`, the first ones, None for the gap, and the last."""
    if count <= most:
        return list(range(count))
    return [*range(most - 2), None, count - 1]


@dataclass(frozen=True)
class RankGrid:
    """The ranks of a run as frames (one per pp rank) of rows and columns."""

    ranks: np.ndarray
    """Of shape (frames, rows, columns)."""
    row_axes: str
    """The axes that the rows count."""
    column_axes: str
    ranks_per_node: int | None
    """Ranks that share a node, if the cluster is known."""


def rank_grid(plan: Plan, cluster: Cluster | None) -> RankGrid:
    """Ranks in mesh order: `cp` and `tp` across, data-parallel axes down; without them, shards across.

    Raises `PlacementError` if the plan does not fit the cluster.
    """
    degrees = plan.degrees
    if degrees.cp * degrees.tp > 1:
        down = _product(("replicate", degrees.replicate), ("shard", degrees.shard))
        across = _product(("cp", degrees.cp), ("tp", degrees.tp))
        rows = degrees.dp
    else:
        down, across, rows = (
            _product(("replicate", degrees.replicate)),
            _product(("shard", degrees.shard)),
            degrees.replicate,
        )
    ranks = dense_ranks(plan, cluster).reshape(degrees.pp, rows, -1)
    return RankGrid(ranks, down, across, ranks_per_node(degrees.world, cluster) if cluster else None)


def mesh_svg(grid: RankGrid) -> str:
    """The mesh: a frame for every pp rank; cells of one tint share a node if the cluster is known."""
    pipeline_ranks, all_rows, all_columns = grid.ranks.shape
    rows, columns = elide(all_rows, 8), elide(all_columns, 12 if pipeline_ranks == 1 else 8)
    frames = elide(pipeline_ranks, max(3, 16 // len(columns)))
    inner_width = len(columns) * (CELL_WIDTH + GAP) + GAP
    inner_height = len(rows) * (CELL_HEIGHT + GAP) + GAP
    left, top, between = 2, 22, 18
    parts: list[str] = []
    x = float(left)
    for frame in frames:
        if frame is None:
            parts.append(f'<text x="{x:.0f}" y="{top + inner_height / 2:.0f}">…</text>')
            x += 30
            continue
        parts.append(f'<text class="small" x="{x:.0f}" y="{top - 8}">pp {frame}</text>')
        parts.append(_rect("frame", x, top, inner_width, inner_height, 8))
        for row_index, row in enumerate(rows):
            for column_index, column in enumerate(columns):
                cell_x = x + GAP + column_index * (CELL_WIDTH + GAP)
                cell_y = top + GAP + row_index * (CELL_HEIGHT + GAP)
                rank = None if row is None or column is None else int(grid.ranks[frame, row, column])
                parts.append(_cell(cell_x, cell_y, rank, grid.ranks_per_node))
        x += inner_width + between
    return _svg(x - between + left, top + inner_height + 4, parts, f"Mesh of {grid.ranks.size} ranks")


def _product(*axes: tuple[str, int]) -> str:
    return " × ".join(f"{name} {degree}" for name, degree in axes if degree > 1) or f"{axes[-1][0]} 1"


def _cell(x: float, y: float, rank: int | None, ranks_per_node: int | None) -> str:
    middle = f'x="{x + CELL_WIDTH / 2:.0f}" y="{y + CELL_HEIGHT / 2 + 4:.0f}" text-anchor="middle"'
    if rank is None:
        return f'<text class="small" {middle}>…</text>'
    node = rank // ranks_per_node if ranks_per_node else 0
    title = f"rank {rank}" + (f", node {node}" if ranks_per_node else "")
    return (
        f"<g><title>{title}</title>{_rect(f'node{node % NODE_TINTS}', x, y, CELL_WIDTH, CELL_HEIGHT, 5)}"
        f"<text {middle}>{rank}</text></g>"
    )


def pipeline_svg(plan: Plan, layers: int) -> str:
    """The stages from left to right, each on the row of the rank that holds it."""
    stages = plan.stage_layers(layers)
    shown = elide(len(stages), 9)
    left, top = 46, 8
    width = STAGE_WIDTH if len(stages) > 1 else LONE_STAGE_WIDTH
    ranks = sorted({plan.rank_of_stage(stage) for stage in shown if stage is not None})
    row_of = {rank: top + index * (STAGE_HEIGHT + 8) for index, rank in enumerate(ranks)}
    parts = [
        f'<text class="small" x="8" y="{y + STAGE_HEIGHT / 2 + 4:.0f}">pp {rank}</text>' for rank, y in row_of.items()
    ]
    before: tuple[float, float] | None = None
    for index, stage in enumerate(shown):
        x = left + index * (width + STAGE_GAP)
        if stage is None:
            parts.append(f'<text class="small" x="{x + width / 2:.0f}" y="{top + 20}">…</text>')
            before = None
            continue
        y = row_of[plan.rank_of_stage(stage)]
        if before:
            parts.append(_link(before, (x, y + STAGE_HEIGHT / 2)))
        parts.append(_stage(x, y, width, stage, stages))
        before = (x + width, y + STAGE_HEIGHT / 2)
    right = left + len(shown) * (width + STAGE_GAP)
    return _svg(right, top + len(ranks) * (STAGE_HEIGHT + 8), parts, f"Pipeline of {len(stages)} stages")


def _stage(x: float, y: float, width: float, stage: int, stages: Sequence[range]) -> str:
    held = stages[stage]
    words = f"{held[0]}–{held[-1]}" if len(held) > 1 else f"{held[0]}" if held else "no layer"
    beside = [name for name, at in (("embedding", 0), ("head", len(stages) - 1)) if stage == at]
    middle = x + width / 2
    title = f"stage {stage}: {len(held)} layers" + "".join(f", {name}" for name in beside)
    return (
        f"<g><title>{escape(title)}</title>{_rect(f'node{stage % 2}', x, y, width, STAGE_HEIGHT, 7)}"
        f'<text x="{middle:.0f}" y="{y + 18:.0f}" text-anchor="middle">{words}</text>'
        f'<text class="small" x="{middle:.0f}" y="{y + 34:.0f}" text-anchor="middle">'
        f"{' + '.join(beside) or f'stage {stage}'}</text></g>"
    )


def _link(start: tuple[float, float], end: tuple[float, float]) -> str:
    half = (start[0] + end[0]) / 2
    return (
        f'<path class="link" d="M{start[0]:.0f} {start[1]:.0f}C{half:.0f} {start[1]:.0f} '
        f'{half:.0f} {end[1]:.0f} {end[0]:.0f} {end[1]:.0f}"/>'
    )


def _rect(name: str, x: float, y: float, width: float, height: float, radius: int) -> str:
    return f'<rect class="{name}" x="{x:.0f}" y="{y:.0f}" width="{width:.0f}" height="{height:.0f}" rx="{radius}"/>'


def _svg(width: float, height: float, parts: Sequence[str], label: str) -> str:
    return (
        f'<div class="scroll"><svg class="picture" width="{width:.0f}" style="min-width:{width * 0.75:.0f}px" '
        f'viewBox="0 0 {width:.0f} {height:.0f}" role="img" aria-label="{escape(label)}">{"".join(parts)}</svg></div>'
    )
