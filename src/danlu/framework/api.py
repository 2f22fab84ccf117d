"""Danlu in a custom training loop: parallelism, sample order, guard and checkpoints, each usable by itself.

    model = danlu.parallelize(model, danlu.plan())

turns a module into one whose states are sharded over all ranks; the loop around it stays. What else `danlu train` does
is here too: `shard_batch` and `StepSampler`, `Guard`, `Checkpointer`.
"""

import sys
import weakref
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn

from danlu.chips.registry import find_chip
from danlu.comm.mesh import ParallelMesh, build_mesh
from danlu.comm.rank_layout import network_spans
from danlu.comm.rendezvous import RankInfo, rendezvous
from danlu.comm.world import World
from danlu.framework.build import apply_parallelism
from danlu.framework.custom.construct import CustomModelError
from danlu.framework.custom.module_adapter import ModuleAdapter, check_layer_list, check_precision_patterns
from danlu.framework.custom.module_structure import find_layers
from danlu.framework.custom.tp_plan import resolve_tp_plan
from danlu.framework.custom.verify_tp import ExampleReference
from danlu.framework.fp8.apply import unquantized
from danlu.framework.state import TrainState
from danlu.framework.step_guard import MAX_SKIPPED_STEPS, StepGuard, stop_on_signal
from danlu.framework.step_metrics import compute_step_metrics
from danlu.language.register import use_kernels
from danlu.parallel.fsdp import reshard_all
from danlu.parallel.grad_norm import clip_grads_with_norm
from danlu.spec.cluster import Cluster
from danlu.spec.custom_model import TPStyleName
from danlu.spec.load import load_plan
from danlu.spec.plan import Degrees, Plan, fully_sharded_plan
from danlu.spec.recipe import ComputeDtype, PrecisionConfig
from danlu.storage.checkpoint.engine import open_checkpoint_engine
from danlu.storage.data.shuffle import shuffled_indices
from danlu.storage.data.token_shards import rank_sample_indices

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
        return fully_sharded_plan(_join_world().size)
    degrees = {axis: settings.pop(axis) for axis in Degrees.model_fields if axis in settings}
    return Plan(degrees=Degrees(**degrees), **settings)


def parallelize(
    model: nn.Module,
    plan: Plan,
    *,
    blocks: str = "",
    tensor: Mapping[str, TPStyleName] | None = None,
    precision: ComputeDtype | PrecisionConfig = "fp32",
    cluster: Cluster | None = None,
    example: Any = None,
) -> nn.Module:
    """Parallelize a module as the plan says, in place; its forward does not change, and gradients are averaged.

    Every rank builds the same module first (seed it), then calls this before it builds the optimizer. `blocks` names
    the list of layers, `tensor` says which matrices `tp` shards (a transformers model has its own `tp_plan`). With
    `tp`, `example` is an input on which the sharded module is compared with the unsharded one.
    """
    _check_axes(plan)
    world = _join_world(cluster)
    if plan.degrees.world != world.size:
        raise CustomModelError(
            "degrees",
            f"make {plan.degrees.world} ranks, but {world.size} were started",
            f"torchrun --nproc-per-node {plan.degrees.world}",
        )
    mesh = build_mesh(plan, world, cluster, experts=False)
    _check_same(model, world)
    structure = find_layers(model, blocks)
    check_layer_list(structure, plan)
    dtypes = precision if isinstance(precision, PrecisionConfig) else PrecisionConfig(compute=precision)
    check_precision_patterns(structure, dtypes)
    tp_plan = resolve_tp_plan(model, tensor or {}, plan.degrees.tp) if mesh.tp_mesh is not None else {}
    reference = ExampleReference(model, example) if tp_plan and example is not None else None
    # Sharding moves parameters to the device unit by unit: the full model need not fit there.
    apply_parallelism(model, ModuleAdapter(structure, tp_plan), plan, mesh, dtypes, average_gradients=True)
    if reference is not None:
        with unquantized([model]):  # as the reference is
            reference.check(model, plan.degrees.tp)
        reshard_all(model)
    elif mesh.tp_mesh is not None and mesh.rank == 0:
        _print_stderr("tensor parallelism is not verified: pass `example=` to compare with the unsharded module")
    setattr(model, _MESH, mesh)
    return model


def get_mesh(model: nn.Module) -> ParallelMesh:
    """The mesh of a module that was parallelized with `parallelize`."""
    mesh = getattr(model, _MESH, None)
    if not isinstance(mesh, ParallelMesh):
        raise ValueError(f"{type(model).__name__} must have come from danlu.parallelize, but has no mesh")
    return mesh


def shard_batch(batch: Tensor, model: nn.Module) -> Tensor:
    """This rank's rows of a global batch, on its device; ranks of one `tp` group get the same rows."""
    mesh = get_mesh(model)
    rows = rank_sample_indices(0, len(batch), mesh.dp_rank, mesh.plan.degrees.dp)
    return batch[torch.from_numpy(rows)].to(mesh.device)


class StepSampler:
    """Which samples a rank reads in a step: a pure function of seed and step, so that resuming needs only the step.

    Every epoch visits each sample once, in an order of its own; no list of samples is kept.
    """

    def __init__(self, samples: int, batch: int, model: nn.Module, seed: int = 0) -> None:
        """`samples` there are in all; `batch` of them make one step over all ranks."""
        mesh = get_mesh(model)
        self.samples, self.batch, self.seed = samples, batch, seed
        self.data_shard = (mesh.dp_rank, mesh.plan.degrees.dp)

    def at(self, step: int) -> NDArray[np.int64]:
        """Indices of this rank's samples in a step."""
        return shuffled_indices(
            rank_sample_indices(step * self.batch, self.batch, *self.data_shard), self.samples, self.seed
        )


class Guard:
    """After the backward pass: one loss and one norm over all ranks, and whether the step is taken.

    As a context (`with danlu.Guard(model) as guard`) the first interrupt or termination of any rank becomes
    `guard.stop`, on all ranks after the same step.
    """

    def __init__(self, model: nn.Module, clip: float = 1.0, patience: int = MAX_SKIPPED_STEPS) -> None:
        """Gradients are scaled down to norm `clip` (0 leaves them); after `patience` bad steps in a row it raises."""
        self.model, self.clip = model, clip
        self.loss = self.norm = float("nan")
        self.stop = False
        self.steps = 0
        self._guard = StepGuard(patience=patience)
        self._signals = stop_on_signal()
        self._stop_signaled = lambda: False

    def __enter__(self) -> Self:
        self._stop_signaled = self._signals.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._signals.__exit__(kind, error, trace)

    def commit(self, loss: Tensor) -> bool:
        """Agree on loss (the mean over ranks) and norm, and clip; whether both are finite and the step may be taken."""
        mesh = get_mesh(self.model)
        share = loss.detach() / mesh.plan.degrees.dp
        metrics = compute_step_metrics([self.model], mesh, share, memory=0, stop=self._stop_signaled())
        self.loss, self.norm, self.stop = metrics.loss, metrics.norm, metrics.stop_requested
        self.steps += 1
        accepted = self._guard.judge(self.loss, self.norm, self.steps).applied
        self._guard.raise_if_diverged(self.loss, self.norm, self.steps)
        if accepted:
            clip_grads_with_norm(list(self.model.parameters()), self.norm, self.clip)
        return accepted


class Checkpointer:
    """Checkpoints of a module and its optimizer that any layout can read."""

    def __init__(self, folder: str | Path, model: nn.Module, optimizer: torch.optim.Optimizer, keep: int = 2) -> None:
        """All ranks give the same `folder`; the newest `keep` checkpoints stay."""
        self._state = TrainState([model], optimizer, seed=0)
        mesh = get_mesh(model)
        self._checkpoints = open_checkpoint_engine(folder, keep, mesh.world, mesh.plan.degrees.model_dump())
        weakref.finalize(self, self._checkpoints.abort)  # host memory would outlive the process

    def save(self, step: int) -> Path:
        """Write a checkpoint as of `step` steps; it is complete when this returns."""
        return Path(self._checkpoints.save(step, self._state.tensors(), {"step": step}).path)

    def load(self) -> int:
        """Fill module and optimizer from the newest checkpoint and return its step; 0 if there is none."""
        newest = self._checkpoints.latest_step()
        if newest is None:
            return 0
        scalars, _ = self._checkpoints.load(newest, self._state.tensors())
        return int(scalars["step"])


def _join_world(cluster: Cluster | None = None) -> World:
    """The world that torchrun started, joined if it is not yet; a world of one without torchrun."""
    chip = find_chip()
    device = chip.runtime.set_device(dist.get_node_local_rank(fallback_rank=0))
    use_kernels(device)
    if not dist.is_initialized():
        backend = chip.backend or "gloo"
        if dist.is_torchelastic_launched():
            dist.init_process_group(backend)
        else:
            _print_stderr("one rank; start with torchrun for more")
            World.join(RankInfo(), backend, rendezvous(RankInfo()), device)
    return World.adopt(device, levels=network_spans(cluster, dist.get_world_size()))


def _check_axes(plan: Plan) -> None:
    """Refuse what needs more than a module."""
    needs = {
        "pp": "the step itself, which your loop takes: train with a recipe ([model] factory) for a pipeline",
        "cp": "attention that exchanges heads: describe the model by its shape in a recipe",
        "ep": "expert layers: describe the model by its shape in a recipe",
    }
    for axis, reason in needs.items():
        if (degree := getattr(plan.degrees, axis)) > 1:
            raise CustomModelError(
                f"degrees.{axis}", f"is {degree}, but this axis needs {reason.split(':')[0]}", reason
            )
    if plan.microbatches > 1:
        message = f"is {plan.microbatches}, but your loop takes the microbatches, and nothing here would read it"
        raise CustomModelError("microbatches", message, "call backward once a microbatch, and leave it out of the plan")
    if plan.reduce_gradients is not None:
        message = f'is "{plan.reduce_gradients}", but your loop calls backward, and nothing here would read it'
        raise CustomModelError("reduce_gradients", message, "call the module's set_requires_gradient_sync yourself")
    if plan.loss_chunks > 1:
        message = f"is {plan.loss_chunks}, but your loop computes the loss, and nothing here would read it"
        raise CustomModelError("loss_chunks", message, "leave it out, or train with a recipe")
    for key, usual in (("token_dispatcher", "alltoall"), ("dispatch_chunks", 1)):
        if (asked := getattr(plan, key)) != usual:
            message = f"is {asked!r}, but your loop has no `ep`, and nothing here would send tokens"
            raise CustomModelError(key, message, "leave it out, or train with a recipe")
    if plan.operators:
        message = f"chooses {', '.join(plan.operators)}, but your module computes with its own operators"
        raise CustomModelError("operators", message, "leave it out, or train with a recipe")
    if plan.shard_optimizer_over_replicas:
        message = "is true, but the optimizer is yours, and nothing here would shard its states"
        raise CustomModelError("shard_optimizer_over_replicas", message, "leave it out, or train with a recipe")


def _check_same(model: nn.Module, world: World) -> None:
    """All ranks must have made the same module; one number a parameter is compared."""
    if world.size == 1:
        return
    names = [name for name, _ in model.named_parameters()]
    sums = torch.stack([parameter.detach().double().abs().sum() for parameter in model.parameters()])
    low, high = sums.to(world.device, copy=True), sums.to(world.device, copy=True)
    world.all_reduce(low, "min")
    world.all_reduce(high, "max")
    if different := (low != high).nonzero().flatten().tolist():
        raise ValueError(
            f"every rank must make the same module, but `{names[different[0]]}` and {len(different) - 1} other "
            "parameters differ between ranks; call torch.manual_seed with one seed before making it"
        )


def _print_stderr(text: str) -> None:
    sys.stderr.write(f"danlu: {text}\n")
