"""The TP style of each module of a custom model: from the recipe's table, or from a transformers model's `tp_plan`."""

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from math import gcd

from torch import nn

from danlu.framework.custom.construct import CustomModelError
from danlu.framework.custom.module_structure import tied_parameters
from danlu.parallel.tensor import TPStyle
from danlu.spec.custom_model import TPStyleName
from danlu.spec.problem import suggest_name

_STYLES: dict[TPStyleName, TPStyle] = {
    "column": "column",
    "row": "row replicated",
    "table": "table replicated",
    "gathered": "column gathered",
    "heads": "heads",
}
_TRANSFORMERS: dict[str, TPStyleName] = {
    "colwise": "column",
    "rowwise": "row",
    "embedding_rowwise": "table",
    "colwise_gather_output": "gathered",
    "colwise_rep": "gathered",
    "replicated_with_grad_allreduce": "heads",
}
"""What transformers calls them; other styles are not supported."""


def resolve_tp_plan(module: nn.Module, given: Mapping[str, TPStyleName], tp: int) -> dict[str, TPStyle]:
    """The style of every module sharded over `tp`; every pattern must match modules whose sizes `tp` divides."""
    wanted = dict(given) or _transformers_tp_plan(module, tp)
    modules = dict(module.named_modules())
    styles: dict[str, TPStyle] = {}
    for pattern, style in wanted.items():
        names = [name for name in modules if fnmatchcase(name, pattern)]
        if not names:
            raise CustomModelError(
                f"model.tensor.{pattern}", "matches no module", suggest_name(pattern.replace("*", "0"), list(modules))
            )
        for name in names:
            _check(name, modules[name], style, tp)
            styles[name] = _STYLES[style]
    for names in tied_parameters(module):
        _check_tied_styles([name.rpartition(".")[0] for name in names], modules, styles, tp)
    return styles


def _check_tied_styles(
    owners: Sequence[str], modules: Mapping[str, nn.Module], styles: dict[str, TPStyle], tp: int
) -> None:
    """Modules that share a parameter must shard it alike; a table follows the matrix that it is tied to."""
    split = {owner: _DIM[styles[owner], _kind(modules[owner])] for owner in owners if owner in styles}
    if not split:
        return
    for owner in owners:
        if owner not in split and _kind(modules[owner]) is nn.Embedding and set(split.values()) == {0}:
            _check(owner, modules[owner], "table", tp)
            styles[owner], split[owner] = "table replicated", 0
    if len(split) < len(owners) or len(set(split.values())) > 1:
        names = " and ".join(f"`{owner}`" for owner in owners)
        raise CustomModelError(
            "degrees.tp",
            f"is {tp}, but {names} share a parameter and [model.tensor] does not shard it alike for both",
            'the embedding as "table" and the output matrix as "column" or "gathered", or neither',
        )


def _transformers_tp_plan(module: nn.Module, tp: int) -> dict[str, TPStyleName]:
    """The `tp_plan` of a transformers model in Danlu's style names."""
    plan = getattr(module, "tp_plan", None)
    if not isinstance(plan, Mapping) or not plan:
        raise CustomModelError(
            "degrees.tp",
            f"is {tp}, but nothing says how to shard the matrices of {type(module).__name__}",
            'add a table [model.tensor] with lines such as `"layers.*.up" = "column"`, `"layers.*.down" = "row"`',
        )
    for pattern, style in plan.items():
        if style not in _TRANSFORMERS:
            raise CustomModelError(
                "degrees.tp",
                f"is {tp}, but the `tp_plan` of {type(module).__name__} asks for `{pattern}` as `{style}`, which Danlu "
                f"does not support ({', '.join(_TRANSFORMERS)})",
                "add a table [model.tensor], or use `danlu import hf` for a model that is described by its shape",
            )
    return {pattern: _TRANSFORMERS[style] for pattern, style in plan.items()}


_SHARD_DIMS: dict[tuple[TPStyleName, type[nn.Module]], tuple[int, str]] = {
    ("column", nn.Linear): (0, "outputs"),
    ("gathered", nn.Linear): (0, "outputs"),
    ("row", nn.Linear): (1, "inputs"),
    ("column", nn.Embedding): (1, "columns"),
    ("table", nn.Embedding): (0, "rows"),
}
"""The dim of the weight that a style shards, and what is along it."""
_DIM = {(_STYLES[style], kind): dim for (style, kind), (dim, _) in _SHARD_DIMS.items()}


def _kind(module: nn.Module) -> type[nn.Module]:
    return next((kind for kind in (nn.Linear, nn.Embedding) if isinstance(module, kind)), nn.Module)


def _check(name: str, module: nn.Module, style: TPStyleName, tp: int) -> None:
    """Raise `CustomModelError` if a module cannot be sharded over `tp` ranks."""
    if style == "heads":
        return
    kind = _kind(module)
    if (style, kind) not in _SHARD_DIMS:
        fitting = sorted(each.__name__ for other, each in _SHARD_DIMS if other == style)
        raise CustomModelError(
            f"model.tensor.{name}",
            f'is "{style}", but the module is {type(module).__name__}, not nn.{" or nn.".join(fitting)}',
            "remove it, or use another style",
        )
    dim, what = _SHARD_DIMS[style, kind]
    if (size := module.get_parameter("weight").shape[dim]) % tp:
        raise CustomModelError(
            "degrees.tp", f"is {tp}, but must divide the {size} {what} of `{name}`", f"tp = {gcd(tp, size)}"
        )
