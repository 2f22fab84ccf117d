"""Danlu in a loop of your own: parallelism, data order, guard and checkpoints, each by itself.

    model = danlu.parallelize(model, danlu.plan())

turns a module into one whose states are sharded over all ranks; the loop around it stays. What `danlu train` does
beside that is here too, one class a thing: `share` and `DataOrder`, `Guard`, `Checkpointer`.
"""

import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn

from danlu.chips.registry import find
from danlu.comm.join import Place, join, meet
from danlu.comm.mesh import Mesh, build_mesh
from danlu.compiler.blocks import apply_compile
from danlu.framework import precision as precisions
from danlu.framework.guard import PATIENCE, Judge, stop_on_signal
from danlu.framework.own.anatomy import dissect
from danlu.framework.own.blueprint import check_layered, check_patterns, sharding_units, share_matrices
from danlu.framework.own.factory import OwnModelError
from danlu.framework.own.proof import OnExample
from danlu.framework.own.styles import tensor_map
from danlu.framework.state import TrainState
from danlu.memory.recompute import Region, apply_recompute
from danlu.parallel.norm import clip, local_square_sum
from danlu.parallel.shard import apply_sharding, free_gathered
from danlu.spec.cluster import Cluster
from danlu.spec.load import load_plan
from danlu.spec.own_model import TensorStyle
from danlu.spec.plan import Degrees, Plan, fully_sharded
from danlu.spec.recipe import ComputeDtype, Precision
from danlu.storage.checkpoint.checkpoints import open_checkpoints
from danlu.storage.order import shuffled
from danlu.storage.tokens import batch_rows

_MESH = "_danlu_mesh"


def plan(file: str | Path | None = None, /, **settings: Any) -> Plan:
    """How a model is laid out: a `plan.toml`, or degrees and settings by name; all ranks under `shard` by default.

    `danlu.plan(shard=4, tp=2, recompute="full")` is the plan of eight ranks with these degrees.
    """
    if file is not None:
        if settings:
            raise TypeError(f"a plan is a file or settings, but got {file} and {', '.join(settings)}")
        return load_plan(Path(file))
    if not settings:
        return fully_sharded(_join())
    degrees = {axis: settings.pop(axis) for axis in Degrees.model_fields if axis in settings}
    return Plan(degrees=Degrees(**degrees), **settings)


def parallelize(
    model: nn.Module,
    plan: Plan,
    *,
    blocks: str = "",
    tensor: Mapping[str, TensorStyle] | None = None,
    precision: ComputeDtype | Precision = "fp32",
    cluster: Cluster | None = None,
    example: Any = None,
) -> nn.Module:
    """Lay a module out as the plan says, in place; its forward stays what it is, and gradients are averaged.

    Every rank makes the same module first (seed it), then calls this before making the optimiser. `blocks` names the
    list of layers, `tensor` says which matrices `tp` shares (a transformers model brings its own plan). With `tp`,
    `example` is an input on which the shared module is held against the whole one.
    """
    _check_axes(plan)
    world = _join()
    if plan.degrees.world != world:
        raise OwnModelError(
            "degrees",
            f"make {plan.degrees.world} ranks, but {world} were started",
            f"torchrun --nproc-per-node {plan.degrees.world}",
        )
    device = find().runtime.device(dist.get_node_local_rank(fallback_rank=0))
    mesh = build_mesh(plan, device, dist.get_rank(), cluster, experts=False)
    model.to(device)
    _check_same(model)
    anatomy = dissect(model, blocks)
    check_layered(anatomy, plan)
    dtypes = precision if isinstance(precision, Precision) else Precision(compute=precision)
    check_patterns(anatomy, dtypes)
    expected = None
    if mesh.tensor is not None:
        styles = tensor_map(model, tensor or {}, plan.degrees.tp)
        expected = None if example is None else OnExample(model, example)
        share_matrices(model, styles, mesh.tensor)
    layers = list(anatomy.held(model).values())
    if plan.recompute != "none":
        apply_recompute((Region(layer, draws=True) for layer in layers), plan.recompute)
    if plan.compile:
        apply_compile(layers)
    policy = partial(precisions.policy, dtypes)
    units = sharding_units(model, anatomy, mesh, called=set())
    apply_sharding(model, units, mesh.parameters, policy, policy(""), plan.reshards, average=True)
    if expected is not None:
        expected.check(model, plan.degrees.tp)
        free_gathered(model)
    elif mesh.tensor is not None and mesh.rank == 0:
        _say("matrices are shared over tp without proof: give `example=` an input to hold the result against the whole")
    setattr(model, _MESH, mesh)
    return model


def mesh_of(model: nn.Module) -> Mesh:
    """The mesh of a module that `parallelize` laid out."""
    mesh = getattr(model, _MESH, None)
    if not isinstance(mesh, Mesh):
        raise ValueError(f"{type(model).__name__} must have come from danlu.parallelize, but has no mesh")
    return mesh


def share(batch: Tensor, model: nn.Module) -> Tensor:
    """This rank's rows of a global batch, on its device; ranks that share matrices get the same rows."""
    mesh = mesh_of(model)
    rows = batch_rows(0, len(batch), mesh.data_index, mesh.plan.degrees.data)
    return batch[torch.from_numpy(rows)].to(mesh.device)


class DataOrder:
    """Which samples a rank reads in a step: a pure function of seed and step, so that resuming needs only the step.

    Every epoch visits each sample once, in an order of its own; no list of samples is kept.
    """

    def __init__(self, samples: int, batch: int, model: nn.Module, seed: int = 0) -> None:
        """`samples` there are in all; `batch` of them make one step over all ranks."""
        mesh = mesh_of(model)
        self.samples, self.batch, self.seed = samples, batch, seed
        self.share = (mesh.data_index, mesh.plan.degrees.data)

    def at(self, step: int) -> NDArray[np.int64]:
        """Numbers of this rank's samples in a step."""
        return shuffled(batch_rows(step * self.batch, self.batch, *self.share), self.samples, self.seed)


class Guard:
    """After the backward pass: one loss and one norm over all ranks, and whether the step is taken.

    As a context (`with danlu.Guard(model) as guard`) the first interrupt or termination of any rank becomes
    `guard.stop`, on all ranks after the same step.
    """

    def __init__(self, model: nn.Module, clip: float = 1.0, patience: int = PATIENCE) -> None:
        """Gradients are scaled down to norm `clip` (0 leaves them); `patience` steps in a row may fail."""
        self.model, self.clip = model, clip
        self.loss = self.norm = float("nan")
        self.stop = False
        self.steps = 0
        self._judge = Judge(patience)
        self._signals = stop_on_signal()
        self._asked = lambda: False

    def __enter__(self) -> Self:
        self._asked = self._signals.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._signals.__exit__(kind, error, trace)

    def commit(self, loss: Tensor) -> bool:
        """Agree on loss (the mean over ranks) and norm, clip, and say whether both are finite: take the step then."""
        mesh = mesh_of(self.model)
        world = mesh.plan.degrees.world
        parameters = list(self.model.parameters())
        shares = torch.stack(
            [
                loss.detach().float() / world,
                local_square_sum(parameters, world, mesh.device),
                torch.tensor(float(self._asked()), device=mesh.device),
            ]
        )
        if world > 1:
            dist.all_reduce(shares)
        self.loss, square, asked = shares.tolist()
        self.norm, self.stop = square**0.5, asked > 0
        self.steps += 1
        taken = self._judge.commit(self.loss, self.norm)
        self._judge.check(self.loss, self.norm, self.steps)
        if taken:
            clip(parameters, self.norm, self.clip)
        return taken


class Checkpointer:
    """Checkpoints of a module and its optimiser that any layout can read."""

    def __init__(self, folder: str | Path, model: nn.Module, optimizer: torch.optim.Optimizer, keep: int = 2) -> None:
        """All ranks give the same `folder`; the newest `keep` checkpoints stay."""
        self._state = TrainState([model], optimizer, seed=0)
        mesh = mesh_of(model)
        self._checkpoints = open_checkpoints(folder, keep, mesh.device, mesh.plan.degrees.model_dump())

    def save(self, step: int) -> Path:
        """Write a checkpoint as of `step` steps; it is complete when this returns."""
        return Path(self._checkpoints.save(step, self._state.tensors(), {"step": step}).path)

    def load(self) -> int:
        """Fill module and optimiser from the newest checkpoint and return its step; 0 if there is none."""
        newest = self._checkpoints.latest()
        if newest is None:
            return 0
        scalars, _ = self._checkpoints.load(newest, self._state.tensors())
        return int(scalars["step"])


def _join() -> int:
    """Make this process a rank of what `torchrun` started, unless it is one; the number of ranks."""
    if not dist.is_initialized():
        backend = collectives.backend if (collectives := find().collectives) else "gloo"
        if dist.is_torchelastic_launched():
            dist.init_process_group(backend)
        else:
            _say("one rank; start with torchrun for more")
            join(Place(), backend, meet(Place()))
    return dist.get_world_size()


def _check_axes(plan: Plan) -> None:
    """Refuse what needs more than a module."""
    needs = {
        "pp": "the step itself, which your loop takes: train with a recipe ([model] factory) for a pipeline",
        "cp": "attention that exchanges heads: describe the model by its shape in a recipe",
        "ep": "expert layers: describe the model by its shape in a recipe",
    }
    for axis, reason in needs.items():
        if (degree := getattr(plan.degrees, axis)) > 1:
            raise OwnModelError(f"degrees.{axis}", f"is {degree}, but this axis needs {reason.split(':')[0]}", reason)
    if plan.microbatches > 1:
        message = f"is {plan.microbatches}, but your loop takes the microbatches, and nothing here would read it"
        raise OwnModelError("microbatches", message, "call backward once a microbatch, and leave it out of the plan")


def _check_same(model: nn.Module) -> None:
    """All ranks must have made the same module; one number a parameter is compared."""
    if dist.get_world_size() == 1:
        return
    names = [name for name, _ in model.named_parameters()]
    sums = torch.stack([parameter.detach().double().abs().sum() for parameter in model.parameters()])
    low, high = sums.clone(), sums.clone()
    dist.all_reduce(low, dist.ReduceOp.MIN)
    dist.all_reduce(high, dist.ReduceOp.MAX)
    if different := (low != high).nonzero().flatten().tolist():
        raise ValueError(
            f"every rank must make the same module, but `{names[different[0]]}` and {len(different) - 1} other "
            "parameters differ between ranks; call torch.manual_seed with one seed before making it"
        )


def _say(text: str) -> None:
    sys.stderr.write(f"danlu: {text}\n")
