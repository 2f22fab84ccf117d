"""What torch keeps private and Danlu needs; no other file may import it, and `tests/architecture` sees to that.

Each entry says why it is needed. Only torch 2.13 is tried so far; where an earlier minor is known to differ, the entry
says so.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FileStore, HashStore, PrefixStore, Store, TCPStore, _resolve_process_group
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed._functional_collectives import all_to_all_single, all_to_all_single_autograd, wait_tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard import _fsdp_param
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.pipelining import schedules
from torch.distributed.pipelining._utils import InferenceMode
from torch.distributed.pipelining._utils import _make_tensor_from_meta as make_tensor_from_meta
from torch.distributed.pipelining.stage import _RecvInfo as RecvInfo
from torch.distributed.tensor._dispatch import OpDispatcher
from torch.distributed.tensor.placement_types import _StridedShard as StridedShard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

__all__ = [  # noqa: RUF022  (by subject)
    # Tensors without values, for the dry run and for tracing a user's module; public in no minor.
    "FakeTensor",
    "FakeTensorMode",
    "detect_fake_mode",
    # Sees every operator on this rank's local tensors.
    "TorchDispatchMode",
    # Walk nested inputs and outputs of a user's module.
    "tree_leaves",
    "tree_map",
    # Collectives that autograd and torch.compile understand; the public ones are neither.
    "all_to_all_single",
    "all_to_all_single_autograd",
    "wait_tensor",
    # Receive buffers of a pipeline stage, which Danlu allocates late and frees early.
    "RecvInfo",
    "make_tensor_from_meta",
    # How FSDP and DTensor say that two axes shard one dim.
    "StridedShard",
    # Key-value stores of a rendezvous; public at run time, and missing from the annotations of torch.distributed.
    "FileStore",
    "HashStore",
    "PrefixStore",
    "Store",
    "TCPStore",
    # The parameters that FSDP gathers together: the dry run names them.
    "FSDPParamGroup",
]


def fake_store() -> Store:
    """The store of a world whose other ranks do not exist; importing it registers the backend `fake`."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    return FakeStore()


def clear_dtensor_caches() -> None:
    """Forget how DTensor redistributed on meshes whose groups are closed: an equal mesh would find them there.

    torch 2.9 has no second cache, and nothing to clear there.
    """
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    _clear_sharding_prop_cache()
    with suppress(ImportError):
        from torch.distributed.tensor._redistribute import clear_redistribute_planner_cache

        clear_redistribute_planner_cache()


def all_gather_single(output: Tensor, given: Tensor, group: dist.ProcessGroup | None = None) -> None:
    """Gather one tensor of every rank into one; `all_gather_into_tensor` where torch has no such name."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(output, given, group=group)


def reduce_scatter_single(output: Tensor, given: Tensor, group: dist.ProcessGroup | None = None) -> None:
    """Add up a tensor of every rank and keep this rank's chunk; `reduce_scatter_tensor` where torch has none."""
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    scatter(output, given, group=group)


def resolve_process_group(name: str) -> dist.ProcessGroup:
    """The group that a functional collective names."""
    group: dist.ProcessGroup = _resolve_process_group(name)  # type: ignore[arg-type]
    return group


def foreach_norm(tensors: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """The 2-norm of each tensor, in one call for all of them."""
    return list(torch._foreach_norm(list(tensors), 2.0, dtype=dtype))


def foreach_mul_(tensors: Sequence[Tensor], factor: float) -> None:
    """Multiply each tensor in place, in one call for all of them."""
    torch._foreach_mul_(list(tensors), factor)


def batch_p2p(operations: list[dist.P2POp]) -> list[dist.Work]:
    """Start sends and receives together, as the schedules do."""
    return schedules._batch_p2p(operations)


@contextmanager
def patched_batch_p2p(wrap: Callable[[Callable[..., list[dist.Work]]], Callable[..., list[Any]]]) -> Iterator[None]:
    """Let `wrap` replace the function by which pipeline schedules send and receive."""
    original = schedules._batch_p2p
    schedules._batch_p2p = wrap(original)
    try:
        yield
    finally:
        schedules._batch_p2p = original


def skip_shape_exchange(schedule: Any, stages: Sequence[Any]) -> None:
    """Let a pipeline take the shapes it was given, without a vote of ranks that a dry run does not have."""
    for stage in stages:
        stage._inference_mode = InferenceMode.STATIC
    schedule._warmup_p2p = lambda *_: None


def wrap_schedule_loss(schedule: Any, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace the loss function of a pipeline schedule, if this rank has one."""
    if schedule._loss_fn:
        schedule._loss_fn = wrap(schedule._loss_fn)


def root_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The mesh that a mesh is a slice of."""
    root: DeviceMesh = mesh._get_root_mesh()
    return root


_concatenate = DeviceMesh._concatenate


def concatenate_meshes(meshes: list[DeviceMesh]) -> DeviceMesh:
    """Several slices of a mesh as one new mesh."""
    return _concatenate(meshes)


@contextmanager
def patched_fully_shard(chunk: Callable[..., Any], concatenate: Callable[[list[DeviceMesh]], Any]) -> Iterator[None]:
    """Replace how `fully_shard` chunks a parameter and joins its mesh with that of another axis."""
    fsdp: Any = _fsdp_param
    mesh: Any = DeviceMesh
    original = fsdp._chunk_with_empty
    fsdp._chunk_with_empty, mesh._concatenate = chunk, staticmethod(concatenate)
    try:
        yield
    finally:
        fsdp._chunk_with_empty, mesh._concatenate = original, staticmethod(_concatenate)


@contextmanager
def around_sharding_propagation(begin: Callable[[], None], end: Callable[[], None]) -> Iterator[None]:
    """Call `begin` and `end` around DTensor's sharding propagation, which runs operators that are no part of a step."""
    name = "_propagate_op_sharding_dispatch_slow_path"
    propagate = getattr(OpDispatcher, name)

    def surrounded(dispatcher: OpDispatcher, *args: Any) -> Any:
        begin()
        try:
            return propagate(dispatcher, *args)
        finally:
            end()

    setattr(OpDispatcher, name, surrounded)
    try:
        yield
    finally:
        setattr(OpDispatcher, name, propagate)


def is_backward_running() -> bool:
    """Whether autograd's engine runs in this thread."""
    return bool(torch._C._current_graph_task_id() != -1)


def backward_sequence_number() -> int | None:
    """Sequence number of the autograd node that runs; None outside of nodes."""
    node = torch._C._current_autograd_node()
    return None if node is None else int(node._sequence_nr())


def next_sequence_number() -> int:
    """Sequence number of the next autograd node that this thread makes."""
    return int(torch._C._autograd._get_sequence_nr())


def gathered_parameter(sharded: Any) -> Tensor | None:
    """The parameter that FSDP gathered from all ranks; None before the first time."""
    return getattr(sharded, "_unsharded_param", None)
