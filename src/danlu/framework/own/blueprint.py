"""A user's own module, as `build` sees it."""

import warnings
from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Literal

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from danlu.comm.mesh import Mesh
from danlu.framework import precision
from danlu.framework.own.anatomy import Anatomy, dissect, has_parameters, shared_parameters
from danlu.framework.own.cut import check_cuttable, cut, whole
from danlu.framework.own.factory import OwnModelError, make_empty, make_seeded
from danlu.framework.own.proof import Expected, can_prove
from danlu.framework.own.rehearsal import rehearse
from danlu.framework.own.styles import tensor_map
from danlu.memory.recompute import Region
from danlu.parallel.shard import Unit, allow_view, held_slice
from danlu.parallel.tensor import Style, apply_tp
from danlu.spec.own_model import OwnModel
from danlu.spec.plan import Plan
from danlu.spec.problem import nearest
from danlu.spec.recipe import Precision, Recipe


class BroughtModel:
    """A blueprint of any module: made once without memory and run once to see how it uses its layers.

    Making it raises `OwnModelError` for everything that the plan asks and the module does not offer.
    """

    rest = ""

    def __init__(self, recipe: Recipe, plan: Plan) -> None:
        assert isinstance(recipe.model, OwnModel)
        self.recipe, self.plan, self.own = recipe, plan, recipe.model
        self.empty = make_empty(self.own)
        self.anatomy = dissect(self.empty, self.own.blocks)
        sequences = recipe.batch.sequences // plan.degrees.data // plan.microbatches
        self.seen = rehearse(self.own, self.anatomy, sequences, recipe.batch.length)
        self._held: dict[nn.Module, range] = {}
        self._check()

    def part(self, stage: int) -> nn.Module:
        """The module with the layers of one stage."""
        part = make_empty(self.own)
        held = self.plan.stage_layers(len(self.anatomy.blocks))[stage]
        if self.plan.stages == 1:
            whole(part)
        else:
            cut(part, self.anatomy, self.seen, held)
        self._held[part] = held
        return part

    def split(self, part: nn.Module, mesh: Mesh) -> None:
        """Share matrices over `tp` as the recipe's map or the module's own plan says."""
        if mesh.tensor is not None:
            share_matrices(part, tensor_map(self.empty, self.own.tensor, mesh.size("tp")), mesh.tensor)

    def blocks(self, part: nn.Module) -> list[nn.Module]:
        """The layers of a part."""
        return list(self.anatomy.held(part).values())

    def regions(self, part: nn.Module, mode: Literal["selective", "full"]) -> Iterator[Region]:
        """Whole layers, which may draw random numbers (dropout)."""
        return (Region(block, draws=True) for block in self.blocks(part))

    def units(self, part: nn.Module, mesh: Mesh) -> Iterator[Unit]:
        """Layers; then modules around them that are called, unless they share parameters with others."""
        for name in self.seen.after:
            allow_view(part, name)
        return sharding_units(part, self.anatomy, mesh, called={*self.seen.before, *self.seen.after})

    def fill(self, parts: Iterable[nn.Module], mesh: Mesh) -> None:
        """Values that the user's own code gives; left undefined where `weights` are read afterwards anyway.

        They are made whole on every rank before each takes its part: the one way to get what unknown code would give.
        Where matrices are shared, the whole module is also what the shared one is held against.
        """
        if self.recipe.weights:
            if mesh.size("tp") > 1 and mesh.rank == 0:
                warnings.warn(
                    f"matrices of {self.own.factory} are shared over tp without proof, because `weights` are read and "
                    "no whole module is made; a short run without `weights` proves the map",
                    RuntimeWarning,
                    stacklevel=2,
                )
            for part in parts:
                materialise(part, mesh.device)
            return
        made = make_seeded(self.own, self.recipe.seed)
        expected = self._expected(made) if mesh.size("tp") > 1 and can_prove() else None
        for part in parts:
            materialise(part, mesh.device)
            take_values(part, made)
            if expected:
                expected.prove(part, self._held[part], mesh.device, mesh.size("tp"), mesh.coordinate("tp"))

    def _expected(self, made: nn.Module) -> Expected:
        shape = (1, min(16, self.recipe.batch.length)) if self.plan.stages == 1 else self.seen.scores.shape[:2]
        return Expected(made, self.anatomy, (shape[0], shape[1]), self.own.vocabulary)

    def streams(self, stage: int) -> tuple[Tensor, Tensor]:
        """Shapes as the rehearsal saw them, in the dtypes that the layers compute in."""
        held = self.plan.stage_layers(len(self.anatomy.blocks))[stage]
        tokens = torch.empty(self.seen.scores.shape[:2], dtype=torch.int64, device="meta")
        return (
            tokens if held.start == 0 else self._stream(held.start - 1),
            self._like_scores() if held.stop == len(self.anatomy.blocks) else self._stream(held.stop - 1),
        )

    def _stream(self, layer: int) -> Tensor:
        dtype = precision.compute_dtype(self.recipe.precision, self.anatomy.blocks[layer])
        return _like(self.seen.streams[layer + 1], dtype)

    def _like_scores(self) -> Tensor:
        last = self.seen.after[-1] if self.seen.after else self.rest
        return _like(self.seen.scores, precision.compute_dtype(self.recipe.precision, last))

    def _check(self) -> None:
        plan, degrees = self.plan, self.plan.degrees
        if self.seen.failed:
            warnings.warn(
                f"module {self.own.factory} does not run on tensors without memory ({self.seen.failed}): its scores "
                "are not checked before the first step, and it cannot be dry-run",
                RuntimeWarning,
                stacklevel=2,
            )
        if degrees.pp > 1:
            check_cuttable(self.empty, self.anatomy, self.seen, plan)
        if degrees.tp > 1:
            tensor_map(self.empty, self.own.tensor, degrees.tp)
        check_layered(self.anatomy, plan)
        check_patterns(self.anatomy, self.recipe.precision)


def share_matrices(part: nn.Module, styles: Mapping[str, Style], mesh: DeviceMesh) -> None:
    """Apply tensor parallelism to those of the named modules that a part has kept."""
    held = {name for name, module in part.named_modules() if has_parameters(module)}
    same = shared_parameters(part)
    apply_tp(part, {name: style for name, style in styles.items() if name in held}, mesh)
    tie(part, same)


def check_patterns(anatomy: Anatomy, precision: Precision) -> None:
    """Say which pattern of `precision.layers` is for no module."""
    names = [*anatomy.blocks, *anatomy.outside, ""]
    for index, group in enumerate(precision.layers):
        if not any(fnmatchcase(name, group.match) for name in names):
            key = f"precision.layers[{index}].match"
            raise OwnModelError(key, f'is "{group.match}", which matches no module', nearest(group.match, names))


def check_layered(anatomy: Anatomy, plan: Plan) -> None:
    """Say what recompute and compile need and a module without a list of layers does not offer."""
    asked = {"recompute": plan.recompute != "none", "compile": plan.compile}
    for key, wanted in asked.items():
        if wanted and not anatomy.blocks:
            raise OwnModelError(
                key,
                "works layer by layer, but the module has no list of layers",
                "keep the layers in an nn.ModuleList, or leave it out of the plan",
            )


def sharding_units(part: nn.Module, anatomy: Anatomy, mesh: Mesh, called: set[str]) -> Iterator[Unit]:
    """What is gathered together: every layer, every called module around them that shares no parameter."""
    for name, block in anatomy.held(part).items():
        yield Unit(name, block, mesh.parameters)
    shared = [name for names in shared_parameters(part) for name in names]
    for name, module in anatomy.around(part).items():
        if name in called and not any(each.startswith(f"{name}.") for each in shared):
            yield Unit(name, module, mesh.parameters)


@torch.no_grad()
def take_values(part: nn.Module, made: nn.Module) -> None:
    """Fill what this rank holds of every parameter from the whole module."""
    for name, parameter in part.named_parameters():
        local, offset = held_slice(parameter)
        place = tuple(slice(at, at + size) for at, size in zip(offset, local.shape, strict=True))
        local.copy_(made.get_parameter(name)[place])


def materialise(part: nn.Module, device: torch.device) -> None:
    """Give parameters memory; buffers keep their values, and parameters that were one stay one."""
    same = shared_parameters(part)
    buffers = dict(part.named_buffers())
    part.to_empty(device=device)
    for name, buffer in part.named_buffers():
        buffer.copy_(buffers[name])
    tie(part, same)


def tie(part: nn.Module, same: Iterable[list[str]]) -> None:
    """Make one parameter again of those that were one before they were replaced."""
    for first, *others in same:
        for name in others:
            owner, _, attribute = name.rpartition(".")
            setattr(part.get_submodule(owner), attribute, part.get_parameter(first))


def _like(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty(tensor.shape, dtype=dtype, device="meta", requires_grad=True)
