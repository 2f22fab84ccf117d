"""How far figures of a layout are from those they must equal; what is NaN or missing is never taken for agreement."""

import json
from collections.abc import Iterable, Sequence
from math import isnan, nan
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.tensor import DTensor

from danlu.framework.state import TrainState
from danlu.spec.event import StepEvent

FIGURES = ("loss", "norm", "parameters")
FIRST = ("first loss", "first norm")
"""Of the first step alone, which no other has made noise in."""


def worst(deviations: Iterable[float]) -> float:
    """The largest deviation, and NaN if one is NaN: `max(0.0, nan)` is 0.0. There must be at least one."""
    found = list(deviations)
    if not found:
        raise ValueError("nothing was compared")
    return nan if any(isnan(each) for each in found) else max(found)


def relative(found: Sequence[float], expected: Sequence[float]) -> float:
    """The worst deviation of figures from as many others, relative to them."""
    return worst(abs(a - b) / abs(b) for a, b in zip(found, expected, strict=True))


def whole_parameters(state: TrainState) -> dict[str, torch.Tensor]:
    """Every parameter this rank has a part of, gathered."""
    return {name: (p.full_tensor() if isinstance(p, DTensor) else p).detach() for name, p in state.named_parameters()}


def write_reference(
    folder: Path, name: str, losses: Sequence[float], norms: Sequence[float], parameters: dict[str, torch.Tensor]
) -> None:
    """Keep what a run found, for others to be compared with."""
    (folder / f"{name}.json").write_text(json.dumps({"loss": losses, "norm": norms}))
    np.savez(folder / f"{name}.npz", **{key: value.numpy() for key, value in parameters.items()})


def compare(folder: Path, name: str, reports: Sequence[StepEvent], state: TrainState) -> dict[str, object]:
    """Worst deviations of this rank's run from reference `name`, and which parameters of it were compared."""
    expected = json.loads((folder / f"{name}.json").read_text())
    parameters = whole_parameters(state)
    with np.load(folder / f"{name}.npz") as arrays:
        apart = worst(float(np.abs(value.numpy() - arrays[key]).max()) for key, value in parameters.items())
        missing = sorted(set(arrays) - set(parameters))
    return {
        "loss": relative([report.loss for report in reports], expected["loss"]),
        "norm": relative([report.norm for report in reports], expected["norm"]),
        "parameters": apart,
        "missing": missing,
        "first loss": relative([reports[0].loss], expected["loss"][:1]),
        "first norm": relative([reports[0].norm], expected["norm"][:1]),
    }


def gather(results: Iterable[dict[str, object]], ranks: int) -> dict[str, float]:
    """The worst of every rank of a layout; all ranks must have a result, and some rank must hold each parameter."""
    found = list(results)
    if len(found) != ranks:
        raise ValueError(f"{ranks} ranks must have compared, but {len(found)} have")
    nowhere = set.intersection(*(set(each["missing"]) for each in found))  # type: ignore[call-overload]
    if nowhere:
        raise ValueError(f"no rank compared {', '.join(sorted(nowhere))}")
    keys = (*FIGURES, *(key for key in (*FIRST, "seconds") if key in found[0]))
    return {key: worst(each[key] for each in found) for key in keys}  # type: ignore[misc]


def summary(found: dict[str, dict[str, float]], ranks: dict[str, int], bar: float) -> dict[str, Any]:
    """What a report says of layouts: how many, the worst of all, and each."""
    return {
        "bar": bar,
        "layouts": len(found),
        "worst": {figure: worst(each[figure] for each in found.values()) for figure in FIGURES},
        "by layout": {
            name: {"ranks": ranks[name]} | {figure: each[figure] for figure in FIGURES} for name, each in found.items()
        },
    }


def selected(request: pytest.FixtureRequest) -> list[str]:
    """What the selected tests of this module are parametrized with, by name: nothing else need be trained."""
    chosen: dict[str, None] = {}
    for item in request.session.items:
        if item.path == request.path and isinstance(item, pytest.Function) and hasattr(item, "callspec"):
            chosen |= dict.fromkeys(getattr(value, "name", value) for value in item.callspec.params.values())
    return list(chosen)
