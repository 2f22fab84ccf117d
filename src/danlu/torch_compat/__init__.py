"""What torch keeps private and Danlu needs; no other room may import it, and `tests/architecture` sees to that.

Each entry says why it is needed. Torch 2.9 to 2.13 may be installed; where a minor differs, the entry says so.
`bash .ci/torch VERSION` runs the tests on one of them.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from importlib import import_module
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import FileStore, HashStore, PrefixStore, Store, _resolve_process_group
from torch._C._profiler import _RecordFunctionFast as RecordFunction
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.distributed import device_mesh
from torch.distributed._functional_collectives import all_to_all_single, all_to_all_single_autograd, wait_tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard import _fsdp_param
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import DTensor, _redistribute
from torch.distributed.tensor._collective_utils import MeshTopoInfo
from torch.distributed.tensor._dispatch import OpDispatcher
from torch.distributed.tensor._sharding_prop import ShardingPropagator
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
    # Names what a profiler sees. The public one is an operator, which selective recompute would want to find again.
    "RecordFunction",
    # Walk nested inputs and outputs of a user's module.
    "tree_leaves",
    "tree_map",
    # Collectives that autograd and torch.compile understand; the public ones are neither.
    "all_to_all_single",
    "all_to_all_single_autograd",
    "wait_tensor",
    # How FSDP and DTensor say that two axes shard one dim.
    "StridedShard",
    # Key-value stores of a rendezvous; public at run time, and missing from the annotations of torch.distributed.
    "FileStore",
    "HashStore",
    "PrefixStore",
    "Store",
    # The parameters that FSDP gathers together: the dry run names them.
    "FSDPParamGroup",
]


def fake_store() -> Store:
    """The store of a world whose other ranks do not exist; importing it registers the backend `fake`."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if not torch._C._dispatch_has_kernel_for_dispatch_key("c10d::send", "Meta"):
        import_module("torch.distributed._tools.fake_collectives")  # registers it; torch 2.9 and 2.10
    return FakeStore()


def clear_dtensor_caches() -> None:
    """Forget what DTensor did on meshes whose groups are closed.

    An equal mesh would find them there, and a group in a cache keeps its threads and its connections. torch 2.9 lacks
    the last two caches.
    """
    DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache.cache_clear()
    for owner in (ShardingPropagator, _redistribute):
        for function in vars(owner).values():
            if clear := getattr(function, "cache_clear", None):
                clear()
    MeshTopoInfo.build_from_mesh.cache_clear()
    with suppress(AttributeError):
        torch._C._clear_DTensor_sharding_propagator_cache()
    with suppress(AttributeError):
        _redistribute.clear_redistribute_planner_cache()


def all_gather_single(output: Tensor, given: Tensor, group: dist.ProcessGroup | None = None) -> None:
    """Gather one tensor of every rank into one; `all_gather_into_tensor` where torch has no such name."""
    _all_gather_single()(output, given, group=group)


def begin_all_gather_single(output: Tensor, given: Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Begin to gather one tensor of every rank into one."""
    work: dist.Work = _all_gather_single()(output, given, group=group, async_op=True)
    return work


def _all_gather_single() -> Callable[..., Any]:
    return getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def reduce_scatter_single(output: Tensor, given: Tensor, group: dist.ProcessGroup | None = None) -> None:
    """Add up a tensor of every rank and keep this rank's chunk; `reduce_scatter_tensor` where torch has none."""
    _reduce_scatter_single()(output, given, group=group)


def begin_reduce_scatter_single(output: Tensor, given: Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Begin to add up a tensor of every rank and keep this rank's chunk."""
    work: dist.Work = _reduce_scatter_single()(output, given, group=group, async_op=True)
    return work


def _reduce_scatter_single() -> Callable[..., Any]:
    return getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def resolve_process_group(name: str) -> dist.ProcessGroup:
    """The group that a functional collective names."""
    group: dist.ProcessGroup = _resolve_process_group(name)  # type: ignore[arg-type]
    return group


# One call for all tensors of a list.
foreach_norm, foreach_copy_ = torch._foreach_norm, torch._foreach_copy_
foreach_mul_, foreach_lerp_ = torch._foreach_mul_, torch._foreach_lerp_


def gloo_devices() -> list[Any]:
    """The devices of torch's default group, each with a thread that polls its sockets, or a new one without a group."""
    if dist.group.WORLD is None:
        return [dist.ProcessGroupGloo.create_default_device()]
    return list(cast(Any, dist.group.WORLD._get_backend(torch.device("cpu"))).options._devices)


def gloo_group(
    store: Store, members: Sequence[int], rank: int, wait: timedelta, name: str, about: str, devices: list[Any]
) -> Any:
    """A group of gloo that its members create together: unlike torch's, without a world, and on devices that exist.

    The name of torch's own also depends on how many groups a rank has, which then must be as many on all of them.
    """
    options, known = cast(Any, dist.ProcessGroupGloo)._Options(), dist.distributed_c10d._world
    options._devices, options._timeout, options._threads = devices, wait, 2
    copies = sum(each.startswith(f"{name}#") for each in known.pg_names.values())
    label, index, kind = cast(Any, f"{name}#{copies}"), list(members).index(rank), dist.ProcessGroup.BackendType.GLOO
    store = PrefixStore(label, store)
    group = dist.ProcessGroup(store, index, len(members))
    group._register_backend(torch.device("cpu"), kind, dist.ProcessGroupGloo(store, index, len(members), options))
    group._set_default_backend(kind)
    group._set_group_name(label)
    group._set_group_desc(about)
    known.pg_map[group], known.pg_names[group] = ("gloo", store), label
    known.pg_group_ranks[group] = {member: at for at, member in enumerate(members)}
    known.pg_backend_config[group] = "cpu:gloo"
    cast(Any, dist.distributed_c10d)._register_process_group(label, group)
    return group


# Where the ranks of torch's default group found each other.
default_store: Callable[[], Store] = dist.distributed_c10d._get_default_store


def abort_process_groups() -> None:
    """Interrupt the collectives of all groups, where a backend can do that itself; from any thread."""
    dist.distributed_c10d._abort_process_group()


def flatten_sequence_first(linear: nn.Linear) -> None:
    """Let a linear layer multiply hidden states that are sharded by sequence.

    Before 2.12 DTensor cannot flatten batch and sequence if the second is sharded, and 2.12 cannot in a dry run; if the
    sequence comes first, they can.
    """
    if torch.__version__ < (2, 13):  # type: ignore[operator]  # a version, which compares with numbers
        module, multiply = cast(Any, linear), linear.forward
        module.forward = lambda x_BSD: multiply(x_BSD.transpose(0, 1)).transpose(0, 1)


def root_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The mesh that a mesh is a slice of."""
    root: DeviceMesh = mesh._get_root_mesh() if _concatenate else device_mesh._mesh_resources.get_root_mesh(mesh)
    return root


_concatenate: Any = getattr(DeviceMesh, "_concatenate", None)
"""None before 2.10, where FSDP takes a slice of the root mesh instead, which is the root if all axes are in it."""


def concatenate_meshes(meshes: list[DeviceMesh]) -> DeviceMesh:
    """Several slices of a mesh as one new mesh."""
    if _concatenate is None:
        return root_mesh(meshes[0])[tuple(name for mesh in meshes for name in mesh.mesh_dim_names or ())]
    joined: DeviceMesh = _concatenate(meshes)
    return joined


@contextmanager
def patched_fully_shard(chunk: Callable[..., Any], concatenate: Callable[[list[DeviceMesh]], Any]) -> Iterator[None]:
    """Replace how `fully_shard` chunks a parameter and joins its mesh with that of another axis."""
    fsdp: Any = _fsdp_param
    mesh: Any = DeviceMesh
    original = fsdp._chunk_with_empty
    fsdp._chunk_with_empty = chunk
    if _concatenate is not None:
        mesh._concatenate = staticmethod(concatenate)
    try:
        yield
    finally:
        fsdp._chunk_with_empty = original
        if _concatenate is not None:
            mesh._concatenate = staticmethod(_concatenate)


@contextmanager
def around_sharding_propagation(begin: Callable[[], None], end: Callable[[], None]) -> Iterator[None]:
    """Call `begin` and `end` around DTensor's sharding propagation, which runs operators that are no part of a step."""
    name = "_propagate_op_sharding_dispatch_slow_path"
    owner: type = OpDispatcher
    if not hasattr(owner, name):  # before 2.10
        name, owner = "propagate", ShardingPropagator
    propagate = getattr(owner, name)

    def surrounded(*args: Any) -> Any:
        begin()
        try:
            return propagate(*args)
        finally:
            end()

    setattr(owner, name, surrounded)
    try:
        yield
    finally:
        setattr(owner, name, propagate)


def is_gradient_wanted(node: Any) -> bool:
    """Whether the backward pass that runs continues to a node; `needs_input_grad` of a function knows only a full one.

    A pipeline that splits its backward pass asks for the gradients of inputs first, and of weights later. Of a leaf
    that `torch.autograd.grad` is asked for, the engine does not tell: it is wanted.
    """
    if node is None:
        return False
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:
        return True


def tensor_version(tensor: Tensor) -> int:
    """How often a tensor was changed in place."""
    return int(tensor._version)


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


def flash_attention(
    query: Tensor, key: Tensor, value: Tensor, *, causal: bool, added: Tensor | None, scale: float
) -> tuple[Tensor, Tensor] | None:
    """Attention by this device's fused kernel, and its log-sum-exp: `scaled_dot_product_attention` does not return it.

    None where the device has no such kernel for these tensors. Of `[sequences, heads, positions, width]`.
    """
    kernel = _flash_kernel(query, added)
    if kernel == "cpu":
        run = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        out, logsumexp = run(query, key, value, 0.0, causal, attn_mask=added, scale=scale)
        return out, logsumexp
    if kernel == "accelerator":
        out, logsumexp, *_ = torch.ops.aten._scaled_dot_product_flash_attention(
            query, key, value, 0.0, causal, scale=scale
        )
        return out, logsumexp
    return None


def flash_attention_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    *,
    causal: bool,
    added: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor] | None:
    """The gradients of query, key and value by the kernel of `flash_attention`; None where there is none."""
    kernel = _flash_kernel(query, added)
    if kernel == "cpu":
        run = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        gradients = run(grad, query, key, value, out, logsumexp, 0.0, causal, attn_mask=added, scale=scale)
    elif kernel == "accelerator":
        no_dropout = torch.empty(0, dtype=torch.int64, device=query.device)
        lengths = (None, None, query.shape[2], key.shape[2])  # offsets are for sequences of different lengths
        gradients = torch.ops.aten._scaled_dot_product_flash_attention_backward(
            *(grad, query, key, value, out, logsumexp.contiguous(), *lengths),
            *(0.0, causal, no_dropout, no_dropout),
            scale=scale,
        )
    else:
        return None
    d_query, d_key, d_value = gradients
    return d_query, d_key, d_value


def _flash_kernel(query: Tensor, added: Tensor | None) -> str | None:
    """Which of torch's two flash kernels takes these tensors: that of accelerators knows no mask and no fp32."""
    if query.device.type == "cpu":
        return "cpu"
    key = torch._C._dispatch_key_for_device(query.device.type)
    known = torch._C._dispatch_has_kernel_for_dispatch_key("aten::_scaled_dot_product_flash_attention", key)
    narrow = query.shape[-1] <= 256 and query.shape[-1] % 8 == 0
    half = query.dtype in (torch.bfloat16, torch.float16)
    return "accelerator" if known and narrow and half and added is None else None


CollectiveKernel = Callable[[str, tuple[Any, ...], Callable[[], Any]], Any]
_kernels: dict[str, CollectiveKernel | None] = dict.fromkeys(("count", "answer", "time", "observe"))
"""The last one is called first; to `count`, what is answered is not called."""
_fronted: set[str] = set()
_c10d = torch.library.Library("c10d", "IMPL")
_FRONT = "BackendSelect"  # what autograd calls does not pass the key of autograd


def intercept_collectives(purpose: str, operators: Sequence[str], kernel: CollectiveKernel | None) -> None:
    """Have every call of these c10d operators go to `kernel`, with name, arguments, and what passes the call on.

    There is one for each purpose: to `answer` calls; to `observe` and to `time` them, which see them all; and to
    `count` those that reach the library. None ends it. All paths lead through these operators, also from C++, and a
    backend has no public hook.
    """
    _kernels[purpose] = kernel
    for name in {*operators} - _fronted:
        _fronted.add(name)
        _c10d.impl(name, _front_kernel(name, getattr(torch.ops.c10d, name).default), _FRONT, with_keyset=True)


def _front_kernel(name: str, operator: Any) -> Callable[..., Any]:
    below = torch._C._dispatch_keyset_full_after(getattr(torch._C.DispatchKey, _FRONT))

    def front(keys: Any, *args: Any) -> Any:
        call = partial(operator.redispatch, keys & below, *args)
        for kernel in _kernels.values():
            call = partial(kernel, name, args, call) if kernel else call
        return call()

    return front


def work_of(result: Any) -> dist.Work | None:
    """The handle in what a c10d operator returned."""
    boxed = result[-1] if isinstance(result, tuple | list) else result
    return dist.Work.unbox(boxed) if isinstance(boxed, torch.ScriptObject) else None


def on_completion(work: dist.Work, call: Callable[[], None]) -> None:
    """Call something as soon as a collective on CPUs is over, from whatever thread ends it."""
    work.get_future().add_done_callback(lambda _: call())


def reduce_op_number(boxed: Any) -> int:
    """Which reduction a c10d operator was asked for, by torch's number; -1 if this torch does not say."""
    return int(boxed.op()) if boxed._has_method("op") else -1


def finished_work(result: list[torch.Tensor]) -> Any:
    """The handle of a collective that is over, as c10d's operators return it; DDP takes the tensors from it."""
    future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
    future.set_result(result)
    return cast(Any, torch._C._distributed_c10d)._create_work_from_future(future).boxed()


@contextmanager
def nested_fsdp_gathered(module: nn.Module) -> Iterator[None]:
    """Gather what FSDP shards inside a module, and let its hooks there do nothing: a block is run beside a step.

    In the state before a backward pass these hooks leave gathering and freeing to others, in torch 2.9 to 2.13; there
    is no public way to say so. A forward that they see would be counted as part of the step.
    """
    nested = [each for each in module.modules() if each is not module and isinstance(each, FSDPModule)]
    states = [(each, each._get_fsdp_state()) for each in nested]
    before = [state._training_state for _, state in states]
    try:
        for each, state in states:
            each.unshard()
            state._training_state = TrainingState.PRE_BACKWARD
        yield
    finally:
        for (each, state), training_state in zip(states, before, strict=True):
            state._training_state = training_state
            each.reshard()


def original_kernel(name: str, key: str) -> Any:
    """torch's kernel of an operator (`aten::mm`) for a dispatch key, to be called after it was replaced; or None.

    `torch.library.get_kernel` is public, but younger than the oldest torch.
    """
    get_kernel = getattr(torch.library, "get_kernel", None)
    return None if get_kernel is None else get_kernel(name, key)


def inductor_pass(apply: Callable[[torch.fx.Graph], None], cache_key: str) -> Any:
    """A function over graphs as Inductor wants one of a user: with a key for its cache, and of a private class.

    The same in torch 2.9 to 2.13. Imported here: Inductor takes seconds to load, and only compiled blocks need it.
    """
    from torch._inductor.custom_graph_pass import CustomGraphPass

    class NamedPass(CustomGraphPass):
        def __call__(self, graph: torch.fx.Graph) -> None:
            apply(graph)

        def uuid(self) -> str:
            return cache_key

        # Equal passes must compare equal: Dynamo shares code only among calls with equal options.
        def __eq__(self, other: object) -> bool:
            return getattr(other, "uuid", lambda: None)() == cache_key

        def __hash__(self) -> int:
            return hash(cache_key)

    return NamedPass()


# A pass computes with real tensors, while the compiler that calls it computes with FakeTensors; public in no minor.
without_fake_tensors = unset_fake_temporarily


grouped_mm: Any = getattr(torch.nn.functional, "grouped_mm", None)
"""Products of groups of rows with a matrix each; public since torch 2.10."""


def is_fake(tensor: Tensor) -> bool:
    """Whether a tensor has no values, as in a dry run."""
    return isinstance(tensor, FakeTensor)


# Inside its autograd kernel an operator is called again, below autograd; public in no minor.
below_autograd: Any = torch._C._AutoDispatchBelowAutograd
