"""Rules between a plan or a recipe and the cluster they run on."""

from collections.abc import Callable, Iterator
from math import gcd, prod

from danlu.spec.cluster import Cluster
from danlu.spec.divisors import closest_divisor, closest_multiple
from danlu.spec.load import ParsedSpec
from danlu.spec.plan import DENSE_AXES, Plan
from danlu.spec.problem import Problem, suggest_name
from danlu.spec.rank_placement import (
    PlacementError,
    foldable_ranks,
    nodes_used,
    place_dense_axes,
    placement_levels,
    ranks_per_node,
)
from danlu.spec.recipe import ComputeDtype, Recipe

PlanRule = Callable[[ParsedSpec[Plan]], Iterator[Problem]]
NetworkRule = Callable[[ParsedSpec[Plan], ParsedSpec[Cluster]], Iterator[Problem]]
ChipRule = Callable[[ParsedSpec[Recipe], ParsedSpec[Cluster]], Iterator[Problem]]


def mapping_needs_cluster(plan: ParsedSpec[Plan]) -> Iterator[Problem]:
    """A mapping names levels of a network, which only a cluster defines."""
    if plan.value.mapping:
        axes = ", ".join(plan.value.mapping)
        yield plan.problem(
            "mapping", f"places {axes} on a network, but no cluster was given", "give one with --cluster, or remove it"
        )


def world_fits(plan: ParsedSpec[Plan], cluster: ParsedSpec[Cluster]) -> Iterator[Problem]:
    """The cluster has enough chips for the ranks."""
    degrees, chips = plan.value.degrees, cluster.value.chips
    if degrees.world > chips:
        product = " × ".join(f"{axis} {getattr(degrees, axis)}" for axis in DENSE_AXES if getattr(degrees, axis) > 1)
        shard = degrees.shard * chips // degrees.world
        smaller = f"shard = {shard}" if shard else f"degrees whose product is {chips} or less"
        yield plan.problem(
            "degrees", f'make {degrees.world} ranks ({product}), but "{cluster.value.name}" has {chips} chips', smaller
        )


def enough_nodes(plan: ParsedSpec[Plan], cluster: ParsedSpec[Cluster]) -> Iterator[Problem]:
    """Every node holds the same number of ranks, and there are enough nodes for that."""
    world, chips, per_node = plan.value.degrees.world, cluster.value.chips, cluster.value.chips_per_node
    nodes, each = nodes_used(world, cluster.value), ranks_per_node(world, cluster.value)
    if world <= chips and nodes > chips // per_node:
        yield plan.problem(
            "degrees",
            f"make {world} ranks, which spread evenly over {nodes} nodes ({each} on each), but "
            f'"{cluster.value.name}" has {chips // per_node} nodes of {per_node} chips',
            f"degrees whose product is a multiple of {per_node}, such as {closest_multiple(world, per_node)}",
        )


def levels_exist(plan: ParsedSpec[Plan], cluster: ParsedSpec[Cluster]) -> Iterator[Problem]:
    """A mapping names levels the cluster has."""
    names = [level.name for level in cluster.value.levels]
    for axis, factors in plan.value.mapping.items():
        for name in factors:
            if name not in names:
                yield plan.problem(
                    f"mapping.{axis}.{name}",
                    f'is not a level of "{cluster.value.name}", which has {", ".join(names)}',
                    suggest_name(name, names),
                )


def factors_make_the_degree(plan: ParsedSpec[Plan]) -> Iterator[Problem]:
    """The factors of an axis multiply to its degree."""
    for axis, factors in plan.value.mapping.items():
        degree, product = getattr(plan.value.degrees, axis), prod(factors.values())
        if product != degree:
            text = " × ".join(f"{name} {factor}" for name, factor in factors.items()) or "nothing"
            yield plan.problem(
                f"mapping.{axis}",
                f"multiplies to {product} ({text}), but `degrees.{axis}` is {degree}",
                _other_factor(factors, degree) or f"set `{axis} = {product}` under [degrees]",
            )


def _other_factor(factors: dict[str, int], degree: int) -> str:
    """The outermost factor that gives the right product, if there is one."""
    *inner, last = factors or [""]
    rest = prod(factors[name] for name in inner)
    return f"{last} = {degree // rest}" if last and degree % rest == 0 else ""


def factors_fit_levels(plan: ParsedSpec[Plan], cluster: ParsedSpec[Cluster]) -> Iterator[Problem]:
    """Together the dense axes on one level divide the ranks there."""
    try:
        levels = placement_levels(plan.value, cluster.value)
    except PlacementError:
        return  # `world_fits` or `enough_nodes` reports it
    for level in levels:
        placed = {axis: plan.value.mapping.get(axis, {}).get(level.name, 1) for axis in DENSE_AXES}
        product = prod(placed.values())
        if level.ranks % product:
            axis = max(placed, key=lambda name: placed[name])
            others = product // placed[axis]
            valid = closest_divisor(placed[axis], level.ranks // gcd(level.ranks, others))
            text = " × ".join(f"{name} {factor}" for name, factor in placed.items() if factor > 1)
            yield plan.problem(
                f"mapping.{axis}.{level.name}",
                f"is {placed[axis]}; together ({text}) the axes take {product} ranks of level {level.name}, but must "
                f"divide the {level.ranks} there",
                f"{level.name} = {valid}, and the rest of {axis} on another level",
            )


def experts_fit_levels(plan: ParsedSpec[Plan], cluster: ParsedSpec[Cluster]) -> Iterator[Problem]:
    """`ep` folds the ranks of `shard`, `cp` and `tp`, so it is limited to theirs on a level."""
    wanted = plan.value.mapping.get("ep")
    if not wanted or prod(wanted.values()) != plan.value.degrees.ep:
        return  # `factors_make_the_degree` reports a wrong product
    try:
        levels, room = (
            placement_levels(plan.value, cluster.value),
            foldable_ranks(place_dense_axes(plan.value, cluster.value)),
        )
    except PlacementError:
        return  # another rule reports it
    for level, ranks in zip(levels, room, strict=True):
        factor = wanted.get(level.name, 1)
        if ranks % factor:
            yield plan.problem(
                f"mapping.ep.{level.name}",
                f"is {factor}, but must divide the ranks of `shard` × `cp` × `tp` on level {level.name} ({ranks})",
                f"{level.name} = {closest_divisor(factor, ranks)}, and the rest of ep on another level",
            )


def chip_has_the_precision(recipe: ParsedSpec[Recipe], cluster: ParsedSpec[Cluster]) -> Iterator[Problem]:
    """Without a peak for a precision the speed cannot be predicted."""
    peak, precision = cluster.value.chip.peak, recipe.value.precision
    used: dict[ComputeDtype, None] = dict.fromkeys(
        [precision.compute, *(group.compute for group in precision.layers if group.compute)]
    )
    for dtype in used:
        if dtype not in peak:
            known = ", ".join(f'"{name}"' for name in peak)
            yield cluster.problem(
                "chip.peak",
                f'has no "{dtype}", in which the recipe computes ({recipe.document.path}: `precision`); it has {known}',
                f"add `{dtype} = …`, or choose a precision the chip has",
            )


def chip_has_muons_precision(recipe: ParsedSpec[Recipe], cluster: ParsedSpec[Cluster]) -> Iterator[Problem]:
    """Muon's iterations run in a precision of their own."""
    optimizer, peak = recipe.value.optimizer, cluster.value.chip.peak
    if optimizer.has_muon and optimizer.newton_schulz_dtype not in peak:
        known = [name for name in ("fp32", "bf16") if name in peak]
        yield recipe.problem(
            "optimizer.newton_schulz_dtype",
            f'is "{optimizer.newton_schulz_dtype}", but the chip of "{cluster.value.name}" has no such peak; it has '
            + ", ".join(f'"{name}"' for name in peak),
            f'newton_schulz_dtype = "{known[0]}"' if known else 'kind = "adamw"',
        )


NETWORK_RULES: tuple[NetworkRule, ...] = (
    world_fits,
    enough_nodes,
    levels_exist,
    factors_fit_levels,
    experts_fit_levels,
)
MAPPING_RULES: tuple[PlanRule, ...] = (factors_make_the_degree,)
CHIP_RULES: tuple[ChipRule, ...] = (chip_has_the_precision, chip_has_muons_precision)
