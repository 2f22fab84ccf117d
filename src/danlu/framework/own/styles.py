"""How the ranks of `tp` share a user's module: the map of the recipe, or the plan that a transformers model brings."""

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from math import gcd

from torch import nn

from danlu.framework.own.anatomy import shared_parameters
from danlu.framework.own.factory import OwnModelError
from danlu.parallel.tensor import Style
from danlu.spec.own_model import TensorStyle
from danlu.spec.problem import nearest

_STYLES: dict[TensorStyle, Style] = {
    "column": "column",
    "row": "row whole",
    "table": "table whole",
    "gathered": "column gathered",
    "heads": "heads",
}
_TRANSFORMERS: dict[str, TensorStyle] = {
    "colwise": "column",
    "rowwise": "row",
    "embedding_rowwise": "table",
    "colwise_gather_output": "gathered",
    "colwise_rep": "gathered",
    "replicated_with_grad_allreduce": "heads",
}
"""What transformers calls them; other styles are not known here."""


def tensor_map(module: nn.Module, given: Mapping[str, TensorStyle], tp: int) -> dict[str, Style]:
    """The style of every module that `tp` ranks share; checks that every pattern has modules, and that they divide."""
    wanted = dict(given) or _own_plan(module, tp)
    modules = dict(module.named_modules())
    styles: dict[str, Style] = {}
    for pattern, style in wanted.items():
        names = [name for name in modules if fnmatchcase(name, pattern)]
        if not names:
            raise OwnModelError(
                f"model.tensor.{pattern}", "matches no module", nearest(pattern.replace("*", "0"), list(modules))
            )
        for name in names:
            _check(name, modules[name], style, tp)
            styles[name] = _STYLES[style]
    for names in shared_parameters(module):
        _keep_tie([name.rpartition(".")[0] for name in names], modules, styles, tp)
    return styles


def _keep_tie(owners: Sequence[str], modules: Mapping[str, nn.Module], styles: dict[str, Style], tp: int) -> None:
    """Modules that share a parameter must split it alike; a table follows the matrix that it is tied to."""
    split = {owner: _DIM[styles[owner], _kind(modules[owner])] for owner in owners if owner in styles}
    if not split:
        return
    for owner in owners:
        if owner not in split and _kind(modules[owner]) is nn.Embedding and set(split.values()) == {0}:
            _check(owner, modules[owner], "table", tp)
            styles[owner], split[owner] = "table whole", 0
    if len(split) < len(owners) or len(set(split.values())) > 1:
        names = " and ".join(f"`{owner}`" for owner in owners)
        raise OwnModelError(
            "degrees.tp",
            f"is {tp}, but {names} share a parameter and [model.tensor] does not split it alike for both",
            'an embedding as "table" and the matrix that scores as "column" or "gathered", or none of them',
        )


def _own_plan(module: nn.Module, tp: int) -> dict[str, TensorStyle]:
    """The plan of a transformers model in our words."""
    plan = getattr(module, "tp_plan", None)
    if not isinstance(plan, Mapping) or not plan:
        raise OwnModelError(
            "degrees.tp",
            f"is {tp}, but nothing says which matrices of {type(module).__name__} the ranks share",
            'a table [model.tensor] with lines such as `"layers.*.up" = "column"`, `"layers.*.down" = "row"`',
        )
    for pattern, style in plan.items():
        if style not in _TRANSFORMERS:
            raise OwnModelError(
                "degrees.tp",
                f"is {tp}, but the `tp_plan` of {type(module).__name__} wants `{pattern}` as `{style}`, which Danlu "
                f"does not know ({', '.join(_TRANSFORMERS)})",
                "a table [model.tensor] of your own, or `danlu import hf` into a model that is described by its shape",
            )
    return {pattern: _TRANSFORMERS[style] for pattern, style in plan.items()}


_SPLIT: dict[tuple[TensorStyle, type[nn.Module]], tuple[int, str]] = {
    ("column", nn.Linear): (0, "outputs"),
    ("gathered", nn.Linear): (0, "outputs"),
    ("row", nn.Linear): (1, "inputs"),
    ("column", nn.Embedding): (1, "columns"),
    ("table", nn.Embedding): (0, "rows"),
}
"""The dim of the weight that a style splits, and what lies along it."""
_DIM = {(_STYLES[style], kind): dim for (style, kind), (dim, _) in _SPLIT.items()}


def _kind(module: nn.Module) -> type[nn.Module]:
    return next((kind for kind in (nn.Linear, nn.Embedding) if isinstance(module, kind)), nn.Module)


def _check(name: str, module: nn.Module, style: TensorStyle, tp: int) -> None:
    """Whether a module can be shared by `tp` ranks."""
    if style == "heads":
        return
    kind = _kind(module)
    if (style, kind) not in _SPLIT:
        fitting = sorted(each.__name__ for other, each in _SPLIT if other == style)
        raise OwnModelError(
            f"model.tensor.{name}",
            f'is "{style}", but the module is {type(module).__name__}, not nn.{" or nn.".join(fitting)}',
            "leave it out, or another style",
        )
    dim, what = _SPLIT[style, kind]
    if (size := module.get_parameter("weight").shape[dim]) % tp:
        raise OwnModelError(
            "degrees.tp", f"is {tp}, but must divide the {size} {what} of `{name}`", f"tp = {gcd(tp, size)}"
        )
