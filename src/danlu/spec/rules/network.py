"""Rules between a plan or a recipe and the cluster they run on."""

from collections.abc import Callable, Iterator
from math import gcd, prod

from danlu.spec.cluster import Cluster
from danlu.spec.load import Sourced
from danlu.spec.numbers import closest_divisor
from danlu.spec.plan import DENSE_AXES, Axis, Plan
from danlu.spec.problem import Problem, nearest
from danlu.spec.recipe import ComputeDtype, Recipe

PlanRule = Callable[[Sourced[Plan]], Iterator[Problem]]
NetworkRule = Callable[[Sourced[Plan], Sourced[Cluster]], Iterator[Problem]]
ChipRule = Callable[[Sourced[Recipe], Sourced[Cluster]], Iterator[Problem]]


def mapping_needs_cluster(plan: Sourced[Plan]) -> Iterator[Problem]:
    """A mapping names levels of a network; without a cluster there are none."""
    if plan.value.mapping:
        axes = ", ".join(plan.value.mapping)
        yield plan.problem(
            "mapping", f"places {axes} on a network, but no cluster was given", "give one with --cluster, or remove it"
        )


def world_fits(plan: Sourced[Plan], cluster: Sourced[Cluster]) -> Iterator[Problem]:
    """There are chips enough for the ranks."""
    degrees, chips = plan.value.degrees, cluster.value.chips
    if degrees.world > chips:
        product = " × ".join(f"{axis} {getattr(degrees, axis)}" for axis in DENSE_AXES if getattr(degrees, axis) > 1)
        shard = degrees.shard * chips // degrees.world
        smaller = f"shard = {shard}" if shard else f"degrees whose product is {chips} or less"
        yield plan.problem(
            "degrees", f'make {degrees.world} ranks ({product}), but "{cluster.value.name}" has {chips} chips', smaller
        )


def world_fills_levels(plan: Sourced[Plan], cluster: Sourced[Cluster]) -> Iterator[Problem]:
    """Ranks fill the network from the inside in equal shares: so many a node, so many nodes a pod."""
    world, chips = plan.value.degrees.world, cluster.value.chips
    if world <= chips and _room(world, cluster.value) is None:
        levels = " × ".join(f"{level.fanout} {level.name}" for level in cluster.value.levels)
        valid = closest_divisor(world, chips)
        yield plan.problem(
            "degrees",
            f'make {world} ranks, which do not spread evenly over the levels of "{cluster.value.name}" ({levels})',
            f"degrees whose product divides {chips}, such as {valid}",
        )


def levels_exist(plan: Sourced[Plan], cluster: Sourced[Cluster]) -> Iterator[Problem]:
    """A mapping names levels the cluster has."""
    names = [level.name for level in cluster.value.levels]
    for axis, factors in plan.value.mapping.items():
        for name in factors:
            if name not in names:
                yield plan.problem(
                    f"mapping.{axis}.{name}",
                    f'is not a level of "{cluster.value.name}", which has {", ".join(names)}',
                    nearest(name, names),
                )


def factors_make_the_degree(plan: Sourced[Plan]) -> Iterator[Problem]:
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
    """The change of the outermost factor that mends a product, if there is one."""
    *inner, last = factors or [""]
    rest = prod(factors[name] for name in inner)
    return f"{last} = {degree // rest}" if last and degree % rest == 0 else ""


def factors_fit_levels(plan: Sourced[Plan], cluster: Sourced[Cluster]) -> Iterator[Problem]:
    """Together the dense axes on one level divide the ranks there."""
    room = _room(plan.value.degrees.world, cluster.value)
    if room is None:
        return  # `world_fits` or `world_fills_levels` speaks of it
    for level, ranks in zip(cluster.value.levels, room, strict=True):
        placed = {axis: plan.value.mapping.get(axis, {}).get(level.name, 1) for axis in DENSE_AXES}
        product = prod(placed.values())
        if ranks % product:
            axis = max(placed, key=lambda name: placed[name])
            others = product // placed[axis]
            valid = closest_divisor(placed[axis], ranks // gcd(ranks, others))
            text = " × ".join(f"{name} {factor}" for name, factor in placed.items() if factor > 1)
            yield plan.problem(
                f"mapping.{axis}.{level.name}",
                f"is {placed[axis]}; together ({text}) the axes take {product} ranks of level {level.name}, but must "
                f"divide the {ranks} there",
                f"{level.name} = {valid}, and the rest of {axis} on another level",
            )


def experts_fit_levels(plan: Sourced[Plan], cluster: Sourced[Cluster]) -> Iterator[Problem]:
    """`ep` folds ranks of `shard`, `cp` and `tp`, so that it finds only theirs on a level."""
    dense, wanted = _placed(plan.value, cluster.value), plan.value.mapping.get("ep")
    if dense is None or not wanted:
        return
    for index, level in enumerate(cluster.value.levels):
        factor, ranks = wanted.get(level.name, 1), dense["shard"][index] * dense["cp"][index] * dense["tp"][index]
        if ranks % factor:
            yield plan.problem(
                f"mapping.ep.{level.name}",
                f"is {factor}, but must divide the ranks of `shard` × `cp` × `tp` on level {level.name} ({ranks})",
                f"{level.name} = {closest_divisor(factor, ranks)}, and the rest of ep on another level",
            )


def _room(world: int, cluster: Cluster) -> list[int] | None:
    """Ranks on every level, innermost first; None if they do not spread evenly."""
    room = []
    for level in cluster.levels:
        room.append(gcd(world, level.fanout))
        world //= room[-1]
    return room if world == 1 else None


def _placed(plan: Plan, cluster: Cluster) -> dict[Axis, list[int]] | None:
    """Factors of the dense axes on every level, those left out filled in from the inside; None if the plan is wrong."""
    room = _room(plan.degrees.world, cluster)
    if room is None:
        return None
    placed: dict[Axis, list[int]] = {}
    for axis, factors in plan.mapping.items():
        placed[axis] = [factors.get(level.name, 1) for level in cluster.levels]
        if prod(placed[axis]) != getattr(plan.degrees, axis):
            return None
    for axis in DENSE_AXES:
        for index, factor in enumerate(placed.get(axis, [])):
            if room[index] % factor:
                return None
            room[index] //= factor
    for axis in reversed(DENSE_AXES):
        if axis not in placed:
            placed[axis], left = [], getattr(plan.degrees, axis)
            for index, free in enumerate(room):
                placed[axis].append(gcd(left, free))
                room[index] //= placed[axis][-1]
                left //= placed[axis][-1]
    return placed


def chip_has_the_precision(recipe: Sourced[Recipe], cluster: Sourced[Cluster]) -> Iterator[Problem]:
    """Without a peak for a precision nothing can be said about speed."""
    peak, precision = cluster.value.chip.peak, recipe.value.precision
    used: dict[ComputeDtype, None] = dict.fromkeys([precision.compute, *(group.compute for group in precision.layers)])
    for dtype in used:
        if dtype not in peak and dtype != "fp16":  # fp16 is refused by itself
            known = ", ".join(f'"{name}"' for name in peak)
            yield cluster.problem(
                "chip.peak",
                f'has no "{dtype}", in which the recipe computes ({recipe.document.path}: `precision`); it has {known}',
                f"add `{dtype} = …`, or choose a precision the chip has",
            )


NETWORK_RULES: tuple[NetworkRule, ...] = (
    world_fits,
    world_fills_levels,
    levels_exist,
    factors_fit_levels,
    experts_fit_levels,
)
PLACE_RULES: tuple[PlanRule, ...] = (factors_make_the_degree,)
CHIP_RULES: tuple[ChipRule, ...] = (chip_has_the_precision,)
