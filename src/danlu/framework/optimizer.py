"""The optimizer of a run, which parameters it moves how, and the learning rate over the run."""

from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import partial
from math import cos, pi, sqrt
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from danlu.framework.decoder.moe import Experts
from danlu.framework.muon import Muon
from danlu.framework.owned_parameters import owned_parameters
from danlu.framework.precision import DTYPES
from danlu.parallel.replica_shards import ReplicaShards
from danlu.spec.parameters import ParameterSettings, parameter_settings
from danlu.spec.recipe import DecayShape, LRSchedule, OptimizerConfig, OptimizerKind


class MuonWithAdamW(torch.optim.Optimizer):
    """Muon for some parameters and AdamW for the others, as one optimizer: its groups and states are those of both."""

    def __init__(self, muon: Muon, adamw: torch.optim.Optimizer | None) -> None:
        self.parts: list[torch.optim.Optimizer] = [muon, *([adamw] if adamw else [])]
        super().__init__([group for part in self.parts for group in part.param_groups], {})
        self.state = defaultdict(dict)
        for part in self.parts:
            part.state = self.state

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Step both."""
        assert closure is None, "the loss is computed by the caller"
        for part in self.parts:
            part.step()


class OptimizerOverReplicas(torch.optim.Optimizer):
    """Another optimizer whose states are sharded over replicas, as one of the parameters themselves."""

    def __init__(
        self,
        groups: list[dict[str, Any]],
        build: Callable[[list[dict[str, Any]]], torch.optim.Optimizer],
    ) -> None:
        super().__init__(groups, {})
        self._shards = ReplicaShards(each for group in self.param_groups for each in group["params"])
        owned = self._shards.owned
        self._inner = build([group | {"params": [owned[each] for each in group["params"]]} for group in groups])
        for group, inner in zip(self.param_groups, self._inner.param_groups, strict=True):
            group["lr"] = inner["lr"]

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Move this rank's rows, and bring those that the other replicas moved."""
        assert closure is None, "the loss is computed by the caller"
        for group, inner in zip(self.param_groups, self._inner.param_groups, strict=True):
            inner["lr"] = group["lr"]
        self._shards.take_gradients()
        self._inner.step()
        self._shards.gather()
        for parameter, owned in self._shards.owned.items():
            if owned in self._inner.state:
                self.state[parameter] = self._inner.state[owned]


def build_optimizer(
    stage_modules: Iterable[nn.Module],
    config: OptimizerConfig,
    blocks: Iterable[nn.Module] = (),
    *,
    over_replicas: bool = False,
) -> torch.optim.Optimizer:
    """The optimizer over the parameters of this rank; `blocks` are the layers, whose matrices may be Muon's.

    `over_replicas` shards its states over replicas too, which Muon's cannot be.
    """
    matrices = set(hidden_matrices(blocks)) if config.kind == "muon" else set()
    groups = param_groups(stage_modules, config, matrices)
    adamw: torch.optim.Optimizer | None = None
    if groups["adamw"] or not groups["muon"]:
        build = partial(
            torch.optim.AdamW,
            lr=config.learning_rate,
            betas=(config.beta1, config.beta2),
            eps=config.epsilon,
            fused=True,
        )
        adamw = OptimizerOverReplicas(groups["adamw"], build) if over_replicas else build(groups["adamw"])
    if not groups["muon"]:
        assert adamw is not None
        return adamw
    muon = Muon(
        groups["muon"],
        lr=config.learning_rate,
        weight_decay=config.weight_decay,
        momentum=config.momentum,
        nesterov=config.nesterov,
        steps=config.newton_schulz_steps,
        dtype=DTYPES[config.newton_schulz_dtype],
        adjustment=config.adjust_learning_rate,
    )
    return MuonWithAdamW(muon, adamw)


def param_groups(
    stage_modules: Iterable[nn.Module], config: OptimizerConfig, matrices: Iterable[nn.Parameter] = ()
) -> dict[OptimizerKind, list[dict[str, Any]]]:
    """Groups for each optimizer: those of `config`, and weight decay for matrices but none for norms and biases.

    Parameters are grouped by mesh as well: fused kernels need tensors of one mesh.
    """
    muon = set(matrices)
    groups: dict[tuple[ParameterSettings, bool, DeviceMesh | None], list[nn.Parameter]] = {}
    for stage_module in stage_modules:
        for name, parameter in owned_parameters(stage_module):
            mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
            settings = parameter_settings(name, parameter.ndim, parameter in muon, config)
            groups.setdefault((settings, parameter.ndim > 1, mesh), []).append(parameter)
    made: dict[OptimizerKind, list[dict[str, Any]]] = {"adamw": [], "muon": []}
    for (settings, _, _), parameters in groups.items():
        group = {"params": parameters, "weight_decay": settings.weight_decay}
        made[settings.kind].append(group | {"learning_rate_factor": settings.learning_rate_factor})
    return made


def hidden_matrices(blocks: Iterable[nn.Module]) -> Iterable[nn.Parameter]:
    """The matrices of layers that Muon is for: no embedding, no router, no vector; of our experts, stacks of them."""
    for block in blocks:
        routers = {
            router
            for module in block.modules()
            if hasattr(module, "experts")
            for name in ("router", "gate")
            if isinstance(router := getattr(module, name, None), nn.Module)
        }
        skipped = {parameter for router in routers for parameter in router.parameters()}
        for module in block.modules():
            if isinstance(module, nn.Embedding):
                continue
            dims = (2, 3) if isinstance(module, Experts) else (2,)
            for name, parameter in module.named_parameters(recurse=False):
                biases = name.endswith("bias")  # of experts: a table with a row for each
                if parameter.ndim in dims and not biases and parameter not in skipped:
                    yield parameter


def learning_rate(step: int, steps: int, optimizer: OptimizerConfig, schedule: LRSchedule) -> float:
    """Learning rate of step `step` (from 0) of `steps`: a pure function, so a resumed run needs no state for it."""
    return optimizer.learning_rate * _factor(step, steps, schedule)


def _factor(step: int, steps: int, schedule: LRSchedule) -> float:
    if step < schedule.warmup:
        return (step + 1) / schedule.warmup
    if schedule.kind == "constant":
        return 1.0
    start = schedule.warmup
    if schedule.kind == "wsd":
        start = max(start, steps - (steps // 10 if schedule.decay is None else schedule.decay))
    if step < start:
        return 1.0
    progress = (step - start) / max(1, steps - start)
    shape: DecayShape = (
        "cosine" if schedule.kind == "cosine" else schedule.shape if schedule.kind == "wsd" else "linear"
    )
    return schedule.final + (1 - schedule.final) * _decay(shape, progress)


def _decay(shape: DecayShape, progress: float) -> float:
    """How much of a decay is left after a share of its steps."""
    match shape:
        case "cosine":
            return (1 + cos(pi * progress)) / 2
        case "1-sqrt":
            return 1 - sqrt(progress)
        case "linear":
            return 1 - progress
