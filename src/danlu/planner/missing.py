"""What the runtime lacks, and what a layout would gain if it had it: predicted, or not priced with the reason.

A plan proposes only what the runtime does. What others do is a trait of `Software` here: the same layout is predicted
again with the trait, so a gain is that of the trait alone. Another layout may gain more from it.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from danlu.cost.software import TokenDispatch
from danlu.cost.step_prediction import StepPrediction
from danlu.planner.pricing import PlanPricer, PricedPlan
from danlu.planner.search_space import DataKnobs
from danlu.spec.divisors import divisors
from danlu.spec.plan import SPLIT_BACKWARD_SCHEDULES


@dataclass(frozen=True, kw_only=True)
class MissingFeature:
    """Something that a plan cannot ask for, or that the search does not try by itself."""

    name: str
    reason: str
    """Why it is not offered."""
    seconds: float | None = None
    """Less per step; negative if the layout would be slower. None if it is not priced."""
    share: float | None = None
    """The same as a share of the step."""
    bytes: float | None = None
    """Less on the fullest chip."""
    not_priced: str = ""
    """Why there is no figure."""


def missing_features(priced: PricedPlan) -> list[MissingFeature]:
    """What a layout would gain from each feature that the runtime lacks, the largest gain first.

    Features of axes that the layout does not use are omitted; what cannot be priced comes last.
    """
    found = [feature for find in _FEATURES for feature in find(_Variation(priced))]
    return sorted(found, key=lambda feature: (feature.seconds is None, -(feature.seconds or 0.0)))


class _Variation:
    """One layout, predicted with other traits of the software."""

    def __init__(self, priced: PricedPlan) -> None:
        self.priced, self.pricer = priced, PlanPricer(priced.request)
        self.shape, self.schedule, self.data = priced.candidate

    def gain(self, name: str, reason: str, *, dtype: str = "", **traits: Any) -> MissingFeature:
        """The feature whose traits are these."""
        return self.gain_of(name, reason, self.predict(dtype, **traits))

    def predict(self, dtype: str = "", **traits: Any) -> StepPrediction:
        return self.pricer.predict_with_traits(self.priced.candidate, self.priced.placement, dtype, **traits)

    def predict_data(self, data: DataKnobs) -> StepPrediction:
        candidate = self.priced.candidate._replace(data=data)
        return self.pricer.predict_with_traits(candidate, self.priced.placement, "")

    def gain_of(self, name: str, reason: str, prediction: StepPrediction) -> MissingFeature:
        seconds = self.priced.seconds - prediction.seconds
        return MissingFeature(
            name=name,
            reason=reason,
            seconds=seconds,
            share=seconds / self.priced.seconds,
            bytes=self.priced.peak_bytes - prediction.memory.device_bytes,
        )


def _compile(now: _Variation) -> Iterator[MissingFeature]:
    name = "compiled blocks"
    if now.schedule.compile or (now.shape.pp > 1 and now.schedule.schedule in SPLIT_BACKWARD_SCHEDULES):
        return
    if now.priced.request.cluster.chip.operators:
        yield MissingFeature(
            name=name,
            reason="the runtime has it, but it is searched only with `--fix compile=true`",
            not_priced="the chip's operators were measured one by one, without a compiler",
        )
        return
    if now.schedule.regather_inputs:
        yield now.gain(
            "compiled blocks that gather inputs again",
            "torch's compiler cannot trace the function that gathers again",
            eager=False,
        )
        return
    yield now.gain(
        name,
        "the runtime has it, but it is searched only with `--fix compile=true`: the dry run cannot verify what "
        "compiled blocks keep, and the first step takes the time to compile every kind of block",
        eager=False,
    )


def _fp8(now: _Variation) -> Iterator[MissingFeature]:
    name = "fp8 matmuls"
    reason = 'the runtime has them, but the recipe does not ask: [precision] matmul = "fp8" changes what is learned'
    request = now.priced.request
    if request.recipe.precision.matmul != "none":
        return
    if request.dtype == "fp32":
        yield MissingFeature(name=name, reason=reason, not_priced="the recipe computes in fp32")
    elif "fp8" not in request.cluster.chip.peak:
        yield MissingFeature(name=name, reason=reason, not_priced="the cluster's [chip.peak] has no fp8")
    else:
        yield now.gain(name, reason, dtype="fp8")


def _experts(now: _Variation) -> Iterator[MissingFeature]:
    if now.shape.ep == 1:
        return
    yield now.gain(
        "overlapped expert dispatch",
        "a microbatch waits for its all-to-alls: no other one computes meanwhile",
        overlap_ep_comm=True,
    )
    if not now.schedule.dispatch.deduplicated or now.schedule.dispatch.chunks == 1:
        yield now.gain(
            "tokens sent once, in parts",
            "the runtime has it, but it is searched only with `--fix dispatcher=deduplicated`",
            dispatch=TokenDispatch(deduplicated=True, chunks=2),
        )


def _expert_tp(now: _Variation) -> Iterator[MissingFeature]:
    moe = now.priced.request.model.moe
    if moe is None or now.shape.tp == 1:
        return
    name, reason = "tensor parallelism inside experts", "routed experts' matrices are not sharded over `tp`"
    ranks = now.data.shard * now.shape.cp * now.shape.tp
    degrees = [
        degree
        for degree in divisors(now.shape.tp)
        if degree > 1 and moe.width % degree == 0 and ranks % (now.shape.ep * degree) == 0
    ]
    if not degrees:
        yield MissingFeature(
            name=name, reason=reason, not_priced=f"`ep` = {now.shape.ep} leaves no ranks to shard an expert over"
        )
        return
    best = min((now.predict(expert_tp=degree) for degree in degrees), key=lambda prediction: prediction.seconds)
    yield now.gain_of(name, reason, best)


def _async_tp(now: _Variation) -> Iterator[MissingFeature]:
    if now.shape.tp > 1:
        yield now.gain(
            "asynchronous tensor parallelism",
            "matmuls wait for all that is gathered, and their results are scattered when complete",
            overlap_tp_comm=True,
        )


def _state_sharding(now: _Variation) -> Iterator[MissingFeature]:
    layout = now.priced.candidate
    if layout.shape.pp == 1 < layout.shape.microbatches and now.data.shard > 1 and not now.data.reduces_once_per_step:
        yield now.gain_of(
            "gradients reduced once per step",
            'the runtime has it, but it is not searched: reduce_gradients = "step" in the plan keeps whole gradients '
            "until the last microbatch",
            now.predict_data(now.data._replace(reduces_once_per_step=True)),
        )
    if (
        now.data.replicate > 1
        and not now.data.optimizer_over_replicas
        and not now.priced.request.recipe.optimizer.has_muon
    ):
        yield now.gain_of(
            "moments sharded over replicas",
            "the runtime has it, but it is not searched: shard_optimizer_over_replicas = true in the plan",
            now.predict_data(now.data._replace(optimizer_over_replicas=True)),
        )


def _offload(now: _Variation) -> Iterator[MissingFeature]:
    yield MissingFeature(
        name="activation offload",
        reason="activations are kept on the chip or recomputed",
        not_priced="a cluster file does not state the bandwidth between chip and host",
    )


_FEATURES: tuple[Callable[[_Variation], Iterator[MissingFeature]], ...] = (
    _compile,
    _fp8,
    _experts,
    _expert_tp,
    _async_tp,
    _state_sharding,
    _offload,
)
