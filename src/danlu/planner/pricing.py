"""Time and bytes of a layout: in its place, and at least in any place."""

from dataclasses import replace

from danlu.cost.collectives import Link, Network
from danlu.cost.counts import Counts
from danlu.cost.layout import Layout
from danlu.cost.memory import Memory
from danlu.cost.software import OURS, Software
from danlu.cost.step import Prediction, Predictor
from danlu.planner.least import LeastNetwork
from danlu.planner.places import Place, Spans
from danlu.planner.question import Question
from danlu.planner.space import Candidate, Core, Recompute, Split, Work

_AGAIN = {"none": "none", "selective": "elementwise", "full": "full"}
"""What a plan's words for recompute are in the cost model."""
_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
_NO_MEMORY = Memory(parameters=0, gradients=0, optimizer=0, activations=0, logits=0, buffers=0, groups=0)
"""Where only the time is asked for."""
_BESIDE_PASSES = ("gather", "transfer", "bubble", "gradients", "parameters", "optimizer", "stragglers", "other")
"""Parts of a step that are not passes through layers."""


def software_of(question: Question, recompute: Recompute) -> Software:
    """Our program, as the recipe sets it."""
    precision = question.recipe.precision
    return replace(
        OURS,
        recompute=_AGAIN[recompute],  # type: ignore[arg-type]
        imbalance=question.imbalance,
        activation_bytes=_BYTES[precision.compute],
        parameter_bytes=_BYTES[precision.compute],
        gradient_bytes=_BYTES[precision.reduce],
    )


class Pricing:
    """Prices the layouts of one question; `least` never says more than `exact` does for any place."""

    def __init__(self, question: Question) -> None:
        self.question = question
        self._exact: dict[Recompute, Predictor] = {}
        self._relaxed: dict[Recompute, Predictor] = {}
        self._passes: dict[tuple[int, int, int, int, Recompute], float] = {}
        self._networks = LeastNetwork(self._predictor("none").network, question.chips, question.cluster)

    def exact(self, candidate: Candidate, place: Place, memory: Memory | None = None) -> Prediction:
        """Time and bytes of a layout in its place; `memory` is the layout's where it is known from another place."""
        return self._predictor(candidate.work.recompute).step(self._layout(candidate, place.spans), memory)

    def bytes(self, candidate: Candidate) -> Memory:
        """Bytes of a layout, the same in every place."""
        return self._predictor(candidate.work.recompute).memory(self._layout(candidate, ()))

    def by_place(self, candidate: Candidate) -> tuple[Memory, ...]:
        """Bytes of a rank at every place on the pipeline."""
        return self._predictor(candidate.work.recompute).memory_by_place(self._layout(candidate, ()))

    def counts(self, candidate: Candidate, place: int) -> Counts:
        """FLOPs and bytes sent in a step by a rank at a place on the pipeline."""
        return self._predictor(candidate.work.recompute).counts(self._layout(candidate, ()), place)

    def least(self, candidate: Candidate, memory: Memory | None = None, known: Spans = ()) -> Prediction:
        """Bytes of a layout, and a time that it takes in no place less than; or in none where `known` groups lie so."""
        core, work, split = candidate
        expert_shard = split.shard * core.cp * core.tp // core.ep
        predictor = self._relaxed.get(work.recompute)
        if predictor is None:
            predictor = self._relaxed[work.recompute] = self._made(work.recompute)
        predictor.network, spans = self._networks.of(
            (
                core.tp,
                split.replicate,
                split.shard * core.cp,
                core.data * core.cp,
                expert_shard,
                expert_shard * split.replicate,
                core.cp,
                core.ep,
            ),
            known,
        )
        return predictor.step(self._layout(candidate, spans), memory)

    def least_of(self, core: Core, work: Work | None) -> float:
        """Seconds that no layout with this core (and pipeline) takes less than: passes through layers, and bubble.

        All ranks of a pipeline together do the passes of the whole model, so the slowest takes at least its even share
        of them. A schedule that does not split its backward pass waits for the others' passes over the stages a rank;
        with one stage a rank and no more microbatches than ranks, a slow first rank hides part of that wait, and what
        is left is least where it has twice the passes of a mean one of `pp` + 1 ranks.
        """
        recompute: Recompute = work.recompute if work else "none"
        whole = self._whole_passes(core, recompute)
        even = core.microbatches * whole / core.pp
        if work is None or core.pp == 1 or work.schedule not in ("1f1b", "interleaved"):
            return even
        if self.question.cluster.chip.alone > 1:  # ranks that wait leave their cores to the others
            return even
        if work.virtual == 1 and core.microbatches <= core.pp:
            return max(even, 2 * core.microbatches * whole / (core.pp + 1))
        return even + (whole - whole / core.pp) / work.virtual

    def without(self, level: int) -> "Pricing":
        """The same prices on a network one of whose levels costs nothing."""
        other = Pricing(self.question)
        for recompute in ("none", "selective", "full"):
            predictor = other._made(recompute)
            links = tuple(
                Link(link.capacity, float("inf"), 0.0) if index == level else link
                for index, link in enumerate(predictor.network.links)
            )
            predictor.network = Network(links, predictor.network.start)
            other._exact[recompute] = predictor
        return other

    def _whole_passes(self, core: Core, recompute: Recompute) -> float:
        """Seconds of one microbatch through the whole model on one rank, at least."""
        sequences = self.question.recipe.batch.sequences // (core.data * core.microbatches)
        key = (core.tp, core.cp, core.ep, sequences, recompute)
        found = self._passes.get(key)
        if found is None:
            alone = core._replace(pp=1)
            candidate = Candidate(alone, Work("1f1b", 1, recompute), Split(1, core.data, True))
            parts = self.least(candidate, _NO_MEMORY).parts
            found = sum(seconds for name, seconds in parts.items() if name not in _BESIDE_PASSES) / core.microbatches
            self._passes[key] = found
        return found

    def _layout(self, candidate: Candidate, spans: Spans) -> Layout:
        core, work, split = candidate
        return Layout(
            pp=core.pp,
            replicate=split.replicate,
            shard=split.shard,
            cp=core.cp,
            tp=core.tp,
            ep=core.ep,
            microbatches=core.microbatches,
            schedule=work.schedule,
            stages_per_rank=work.virtual,
            stage_layers=work.layers,
            reshards=split.reshards,
            spans=spans,
        )

    def _predictor(self, recompute: Recompute) -> Predictor:
        found = self._exact.get(recompute)
        if found is None:
            found = self._exact[recompute] = self._made(recompute)
        return found

    def _made(self, recompute: Recompute) -> Predictor:
        question, software = self.question, software_of(self.question, recompute)
        return Predictor(question.model, question.recipe.batch, question.cluster, software, question.dtype)
