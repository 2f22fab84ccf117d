"""Rules of the `[optimizer]` of a recipe."""

from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase

from danlu.spec.load import ParsedSpec
from danlu.spec.parameters import ParameterShape, decoder_parameters, group_of
from danlu.spec.problem import Problem, format_value, suggest_name
from danlu.spec.recipe import OptimizerConfig, OptimizerGroup, Recipe

_MUON_SETTINGS = ("momentum", "nesterov", "newton_schulz_steps", "newton_schulz_dtype", "adjust_learning_rate")


def muon_settings_are_used(recipe: ParsedSpec[Recipe]) -> Iterator[Problem]:
    """Without Muon its settings are unused."""
    optimizer = recipe.value.optimizer
    if optimizer.has_muon:
        return
    for name in _MUON_SETTINGS:
        value = getattr(optimizer, name)
        if value != OptimizerConfig.model_fields[name].default:
            yield recipe.problem(
                f"optimizer.{name}",
                f'is {format_value(value)}, but it is a setting of Muon, and `kind` is "{optimizer.kind}"',
                'remove it, or set `kind = "muon"` under [optimizer]',
            )


def groups_change_something(recipe: ParsedSpec[Recipe]) -> Iterator[Problem]:
    """A group of parameters has a setting of its own."""
    for index, group in enumerate(recipe.value.optimizer.groups):
        if group == OptimizerGroup(match=group.match):
            yield recipe.problem(
                f"optimizer.groups[{index}]",
                "sets nothing, so its parameters are moved as all others",
                "give it `kind`, `learning_rate_factor` or `weight_decay`, or remove it",
            )


def group_patterns_match(recipe: ParsedSpec[Recipe]) -> Iterator[Problem]:
    """Every pattern of `optimizer.groups` matches a parameter, and Muon's only matrices."""
    for problem in group_problems(recipe.value.optimizer, list(decoder_parameters(recipe.value.decoder))):
        yield recipe.problem(*problem)


def group_problems(optimizer: OptimizerConfig, parameters: Iterable[ParameterShape]) -> Iterator[tuple[str, str, str]]:
    """What is wrong with the groups for a model with these parameters: key, message and suggestion."""
    shapes = dict(parameters)
    for index, group in enumerate(optimizer.groups):
        key = f"optimizer.groups[{index}]"
        matched = [name for name in shapes if fnmatchcase(name, group.match)]
        if not matched:
            hint, names = suggest_name(group.match, list(shapes)), list(shapes)
            exist = f"parameters go from {names[0]} to {names[-1]}"
            yield (
                f"{key}.match",
                f'is "{group.match}", which matches no parameter',
                f"{hint} ({exist})" if hint else exist,
            )
        elif not any(group_of(name, optimizer) is group for name in matched):
            yield (
                f"{key}.match",
                f'is "{group.match}", but later groups match all of its {len(matched)} parameters, and the last wins',
                "move it after them, or remove it",
            )
        elif group.kind == "muon":
            flat = [name for name in matched if len(shapes[name]) < 2 and group_of(name, optimizer) is group]
            if flat:
                yield (
                    f"{key}.kind",
                    f'is "muon", which is for matrices, but `match` has {flat[0]} of shape {list(shapes[flat[0]])}',
                    _matrices_alone(name for name in matched if len(shapes[name]) > 1),
                )


def _matrices_alone(names: Iterator[str]) -> str:
    first = next(names, None)
    return f"a pattern of matrices alone, such as `{first}`" if first else "remove `kind`"


OPTIMIZER_RULES = (muon_settings_are_used, groups_change_something)
