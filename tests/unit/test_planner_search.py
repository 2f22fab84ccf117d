"""The planner's answers: the same as pricing everything, and nothing that the runtime would refuse."""

import random
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from made_questions import DENSE, EXPERTS, machine, question, with_recipe

from danlu.cost.software import ALL_AT_ONCE
from danlu.planner import PlanRequest, PlanRequestError, parse_constraints, price_plan, search, search_exhaustively
from danlu.planner.mesh_placement import PlacementEnumerator, placement_of_plan
from danlu.planner.pricing import PlanPricer, PricedPlan
from danlu.planner.search_space import Candidate, ScheduleKnobs, SearchSpace, ShapeKnobs, candidate_from_plan
from danlu.spec.check import find_problems
from danlu.spec.load import ParsedSpec, load_cluster, load_recipe
from danlu.spec.plan import Degrees, Plan
from danlu.spec.recipe import BatchConfig, BatchRampStage, EmaConfig, OptimizerConfig
from danlu.spec.toml import TomlDocument

SMALL = {
    "dense": question(chips=8, cluster=machine(nodes=2)),
    "dense, little memory": question(chips=8, cluster=machine(nodes=2, memory=9e9), length=4096),
    "dense, slow network": question(chips=8, cluster=machine(nodes=2, slow=2e9)),
    "dense, 12 chips on nodes of 4": question(chips=12, cluster=machine(nodes=3), sequences=12),
    "dense, 6 chips": question(chips=6, cluster=machine(nodes=3), sequences=12),
    "experts": question(EXPERTS, chips=8, cluster=machine(nodes=2), sequences=8),
    "experts, little memory": question(EXPERTS, chips=8, cluster=machine(nodes=2, memory=16e9), sequences=8),
    "experts, imbalance": question(EXPERTS, chips=8, cluster=machine(nodes=2), sequences=8, expert_imbalance=2.0),
    "experts across a slow network": question(
        EXPERTS, chips=8, cluster=machine(nodes=2, slow=2e9), sequences=8, fix="ep=8"
    ),
    "experts, tokens sent once": question(
        EXPERTS, chips=8, cluster=machine(nodes=2, slow=2e9), sequences=8, fix="ep=8,dispatcher=deduplicated"
    ),
    "no pipeline": question(chips=16, without="pp"),
    "dense by Muon": with_recipe(question(chips=8, cluster=machine(nodes=2)), optimizer=OptimizerConfig(kind="muon")),
    "experts by Muon, with an average": with_recipe(
        question(EXPERTS, chips=8, cluster=machine(nodes=2), sequences=8),
        optimizer=OptimizerConfig(kind="muon"),
        ema=EmaConfig(),
    ),
    "a batch that grows": with_recipe(
        question(chips=8, cluster=machine(nodes=2)),
        batch=BatchConfig(sequences=16, length=2048, ramp=(BatchRampStage(until=10, sequences=6),)),
    ),
    "one node": question(chips=4, cluster=machine(nodes=1)),
}
SLOW = (
    "experts",
    "experts by Muon, with an average",
    "experts, imbalance",
    "experts, little memory",
    "dense, little memory",
    "dense by Muon",
)
CASES = [pytest.param(name, marks=pytest.mark.full if name in SLOW else ()) for name in SMALL]


@pytest.mark.parametrize("name", CASES)
def test_finds_the_layout_that_pricing_all_of_them_finds(name: str) -> None:
    asked = SMALL[name]
    best, found = search_exhaustively(asked), search(asked, shown=1)
    assert best is not None
    assert found.best[0].seconds == pytest.approx(best.seconds, rel=1e-12)
    assert found.best[0].plan == best.plan
    assert found.priced < found.layouts_searched


@pytest.mark.parametrize("name", CASES)
def test_bounds_are_bounds(name: str) -> None:
    asked, chance = SMALL[name], random.Random(7)
    space, pricing, places = SearchSpace(asked), PlanPricer(asked), PlacementEnumerator(asked.cluster)
    candidates = list(space.candidates())
    for candidate in chance.sample(candidates, min(150, len(candidates))):
        shape, schedule, data = candidate
        schedule = schedule._replace(dispatch=ALL_AT_ONCE)  # bounds are of any way
        any_dispatch = Candidate(shape, schedule, data)
        least = pricing.lower_bound(any_dispatch).seconds
        of_all = pricing.shape_lower_bound(shape, schedule, space.data_splits(shape, schedule))
        of_shape = pricing.shape_lower_bound(shape, schedule, (data,))
        assert pricing.shape_lower_bound(shape, None) <= of_all * (1 + 1e-9)
        assert of_all <= of_shape * (1 + 1e-9)
        for inner, some in places.by_layer_axes(candidate.degrees).items():
            settled = pricing.lower_bound(any_dispatch, known=inner).seconds
            for place in some:
                exact = pricing.price(candidate, place)
                assert least <= settled * (1 + 1e-9)
                assert settled <= exact.seconds * (1 + 1e-9)
                assert of_shape <= exact.seconds * (1 + 1e-9)
                assert pricing.memory(candidate) == exact.prediction.memory


def test_more_shards_never_take_more_bytes() -> None:
    """The search gives up a core whose most sharded layouts do not fit."""
    for asked in (SMALL["dense"], SMALL["experts"]):
        space, pricing = SearchSpace(asked), PlanPricer(asked)
        taken: dict[object, dict[int, float]] = {}
        for candidate in space.candidates():
            sizes = taken.setdefault((candidate.shape, candidate.schedule), {})
            shard, size = candidate.data.shard, pricing.memory(candidate).device_bytes
            sizes[shard] = min(sizes.get(shard, size), size)
        for sizes in taken.values():
            assert sizes[max(sizes)] == min(sizes.values())


@pytest.mark.parametrize("name", SMALL)
def test_from_the_second_number_of_microbatches_on_more_take_less(name: str) -> None:
    """The search looks for the fewest that fit by halving."""
    asked, chance = SMALL[name], random.Random(5)
    space, pricing = SearchSpace(asked), PlanPricer(asked)
    by_pipeline: dict[tuple[ShapeKnobs, ScheduleKnobs], list[float]] = {}
    for shape in space.shapes():
        for schedule in space.schedules_of(shape):
            least = min(pricing.memory(each).device_bytes for each in space.most_sharded(shape, schedule))
            by_pipeline.setdefault((shape._replace(microbatches=1), schedule), []).append(least)
    taken = chance.sample(list(by_pipeline.values()), min(500, len(by_pipeline)))
    assert any(len(each) > 2 for each in taken)
    for each in taken:
        assert all(more <= fewer * (1 + 1e-12) for fewer, more in pairwise(each[1:]))


@pytest.mark.parametrize("name", CASES)
def test_every_answer_passes_the_rules(name: str) -> None:
    asked = SMALL[name]
    answer = search(asked)
    assert len({choice.plan.degrees for choice in answer.best}) == len(answer.best)
    for choice in answer.best:
        assert choice.plan.degrees.world == asked.chips
        assert choice.fits
        _passes(asked, choice.plan)


def test_random_layouts_pass_the_rules_in_all_their_places() -> None:
    chance = random.Random(3)
    for asked in SMALL.values():
        candidates, places = list(SearchSpace(asked).candidates()), PlacementEnumerator(asked.cluster)
        for candidate in chance.sample(candidates, min(20, len(candidates))):
            for place in places.placements(candidate.degrees):
                _passes(asked, candidate.plan(place.to_mapping()))


def _passes(asked: PlanRequest, plan: Plan) -> None:
    paths = [TomlDocument(Path(name), {}, {}) for name in ("recipe", "plan", "cluster")]
    problems = find_problems(
        ParsedSpec(asked.recipe, paths[0]), ParsedSpec(plan, paths[1]), ParsedSpec(asked.cluster, paths[2])
    )
    assert not problems, (plan, problems)


def test_a_plan_is_priced_as_it_was_found() -> None:
    found = search(SMALL["experts"], shown=3)
    for choice in found.best:
        again = price_plan(SMALL["experts"], choice.plan)
        assert again.candidate == choice.candidate == candidate_from_plan(choice.plan)
        assert again.seconds == pytest.approx(choice.seconds)
        assert again.peak_bytes == choice.peak_bytes


def test_nothing_fits_and_says_by_how_much() -> None:
    asked = question(chips=4, cluster=machine(nodes=1, memory=4e9), length=4096)
    answer = search(asked)
    assert not answer.best
    assert answer.least_memory is not None
    assert answer.least_memory.peak_bytes > asked.usable_memory
    assert answer.least_memory.peak_bytes == min(
        PlanPricer(asked).memory(one).device_bytes for one in SearchSpace(asked).candidates()
    )


def test_holds_what_is_fixed_and_leaves_out_what_is_not_wanted() -> None:
    held = search(question(chips=16, fix="tp=2,recompute=full|selective", without="pp"))
    for choice in held.best:
        assert (choice.plan.degrees.tp, choice.plan.degrees.pp) == (2, 1)
        assert choice.plan.recompute in ("full", "selective")
    with pytest.raises(PlanRequestError, match="did you mean `shard`"):
        parse_constraints(fix="dp=4")
    with pytest.raises(PlanRequestError, match="neither an axis"):
        parse_constraints(without="bubbles")
    with pytest.raises(PlanRequestError, match="16 or fewer"):
        question(chips=17)


def test_tokens_go_once_or_in_parts_where_that_is_faster() -> None:
    asked = SMALL["experts across a slow network"]

    def best(fix: str) -> PricedPlan:
        return search(replace(asked, constraints=parse_constraints(fix)), shown=1).best[0]

    once, parts, whole = best("ep=8"), best("ep=8,dispatcher=alltoall"), best("ep=8,dispatcher=alltoall,chunks=1")
    assert once.plan.token_dispatcher == "deduplicated" and once.plan.dispatch_chunks == 1
    assert parts.plan.token_dispatcher == "alltoall" and parts.plan.dispatch_chunks > 1
    assert once.seconds < parts.seconds < whole.seconds
    assert best("ep=8,chunks=4").plan.token_dispatcher == "alltoall", "both together are searched only if asked"
    both = best("ep=8,dispatcher=deduplicated")
    assert both.plan.dispatch_chunks > 1 and both.seconds < once.seconds
    assert best("ep=8,dispatcher=deduplicated,chunks=4").plan.dispatch_chunks == 4


def test_one_expert_a_token_is_sent_in_one_all_to_all() -> None:
    """Nothing is sent twice then, and every level that is passed by itself costs."""
    alone = EXPERTS.model_copy(update={"moe": EXPERTS.moe.model_copy(update={"top_k": 1})})  # type: ignore[union-attr]
    asked = question(alone, chips=8, cluster=machine(nodes=2, slow=2e9), sequences=8, fix="ep=8")
    assert search(asked, shown=1).best[0].plan.token_dispatcher == "alltoall"


def test_groups_reach_as_far_as_their_ranks_lie() -> None:
    cluster = load_cluster("h100-pod")
    plan = Plan(degrees=Degrees(pp=16, shard=128, tp=8), mapping={})
    spans = dict(placement_of_plan(plan, cluster).group_shapes)
    assert spans["tp"] == (8, 1, 1)
    # 2,048 nodes: 384 in a pod; 128 neighbours of a shard axis are a third of one
    assert spans["shard×cp"] == (1, 128, 1)
    inside = Plan(degrees=Degrees(shard=128, tp=8), mapping={"shard": {"node": 8, "pod": 16}, "tp": {"pod": 8}})
    spans = dict(placement_of_plan(inside, cluster).group_shapes)
    assert spans["shard×cp"] == (8, 16, 1)
    assert spans["tp"] == (1, 8, 1)


@pytest.mark.full
def test_a_large_question_is_answered_and_placed_inside() -> None:
    asked = PlanRequest(
        recipe=load_recipe(Path("recipes/llama3-70b.toml")), cluster=load_cluster("h100-pod"), chips=256
    )
    best = search(asked, shown=1).best[0]
    assert 0.2 < best.mfu < 0.8
    assert dict(best.placement.group_shapes)["tp"][0] == best.candidate.shape.tp


def test_a_heavy_head_gets_fewer_layers_beside_it() -> None:
    model = DENSE.model_copy(update={"vocabulary": 64 * DENSE.vocabulary, "layers": 8})
    asked = question(model, machine(memory=4000e9), chips=4, fix="pp=4,tp=1,cp=1,schedule=1f1b,recompute=none")
    (best,) = search(asked, shown=1).best
    layers = best.plan.pipeline.layers
    assert sum(layers) == 8 and layers[-1] < 2
    even = best.plan.model_copy(update={"pipeline": best.plan.pipeline.model_copy(update={"layers": ()})})
    assert best.seconds < price_plan(asked, even).seconds
    assert price_plan(asked, best.plan).seconds == best.seconds


def test_a_bound_does_not_depend_on_what_was_bounded_before() -> None:
    """Groups of the same size lie on links of other speeds once their placement is known."""
    asked = SMALL["experts"]
    candidate = candidate_from_plan(Plan(degrees=Degrees(tp=4, shard=2, ep=4)))
    inner = list(PlacementEnumerator(asked.cluster).by_layer_axes(candidate.degrees))
    alone = [PlanPricer(asked).lower_bound(candidate, known=known).seconds for known in ((), *inner)]
    assert len(set(alone)) > 1, "or there is nothing to confuse"
    pricer = PlanPricer(asked)
    for known, seconds in reversed(list(zip(((), *inner), alone, strict=True))):
        assert pricer.lower_bound(candidate, known=known).seconds == seconds
    assert pricer.shape_lower_bound(candidate.shape, None) == PlanPricer(asked).shape_lower_bound(candidate.shape, None)


def test_compiled_blocks_take_less_time_and_memory_and_are_searched_if_asked() -> None:
    asked = question(chips=8, cluster=machine(nodes=2))
    eager, compiled = (price_plan(asked, Plan(degrees=Degrees(shard=8), compile=each)) for each in (False, True))
    assert compiled.plan.compile and not eager.plan.compile
    assert compiled.prediction.parts["elementwise"] < eager.prediction.parts["elementwise"]
    assert compiled.seconds < eager.seconds and compiled.peak_bytes <= eager.peak_bytes
    assert not search(asked, shown=1).best[0].plan.compile
    wanted = question(chips=8, cluster=machine(nodes=2), fix="compile=true")
    assert search(wanted, shown=1).best[0].plan == search_exhaustively(wanted).plan  # type: ignore[union-attr]
    assert search(wanted, shown=1).best[0].plan.compile


def test_a_compiler_never_costs_time() -> None:
    """Also where little is left to fuse: learned positions, one activation without a gate."""
    gpt = DENSE.model_copy(update={"position": "learned", "activation": "gelu", "norm": "layer", "kv_heads": 0})
    asked = question(gpt, chips=8)
    eager, compiled = (price_plan(asked, Plan(degrees=Degrees(shard=8), compile=each)) for each in (False, True))
    assert compiled.seconds <= eager.seconds and compiled.peak_bytes <= eager.peak_bytes


def test_inputs_are_gathered_again_where_that_makes_a_layout_fit() -> None:
    """Kept inputs are faster, so a search proposes the second gather only where it is needed."""
    fix = "tp=4,shard=2,pp=1,cp=1,recompute=none,microbatch=4,reshard=true"
    roomy = search(question(chips=8, fix=fix, length=4096), shown=1).best[0]
    assert not roomy.plan.regather_inputs
    again = price_plan(roomy.request, roomy.plan.model_copy(update={"regather_inputs": True}))
    assert again.seconds > roomy.seconds and again.peak_bytes < roomy.peak_bytes
    between = (again.peak_bytes + roomy.peak_bytes) / 2 / (1 - roomy.request.reserve)
    tight = search(question(chips=8, fix=fix, length=4096, cluster=machine(memory=between)), shown=1).best[0]
    assert tight.plan.regather_inputs


def test_the_last_stage_is_lighter_where_the_head_is_heavy() -> None:
    """A head over 128,000 tokens takes as long as layers do; one over 1,000 does not."""
    fix = "pp=4,tp=1,cp=1,schedule=1f1b"
    heavy, light = (
        search(question(DENSE.model_copy(update={"vocabulary": size, "layers": 24}), chips=4, fix=fix), shown=1).best[0]
        for size in (128_000, 1_000)
    )
    layers = heavy.plan.pipeline.layers
    assert layers and layers[-1] < max(layers) and sum(layers) == 24
    even = heavy.plan.model_copy(update={"pipeline": heavy.plan.pipeline.model_copy(update={"layers": ()})})
    assert price_plan(heavy.request, even).seconds > 1.01 * heavy.seconds
    assert not light.plan.pipeline.layers
