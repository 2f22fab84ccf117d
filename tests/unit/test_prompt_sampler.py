"""A run's samples where the model's numbers are not finite."""

import pytest
import torch
from torch import Tensor

from danlu.comm.mesh import build_mesh
from danlu.comm.rendezvous import RankInfo, rendezvous
from danlu.comm.world import World
from danlu.framework.prompt_sampler import PromptSampler
from danlu.parallel.batch import Batch
from danlu.spec.load import load_model
from danlu.spec.plan import Plan
from danlu.spec.recipe import BatchConfig, DataConfig, EvaluationConfig, Recipe


class Forward:
    """A model that finds "b" most likely, and from the second token of the first prompt on answers with `broken`."""

    def __init__(self, broken: float) -> None:
        self.broken, self.calls = broken, 0

    def __call__(self, microbatches: list[Batch], read_logits: object) -> list[Tensor]:
        (batch,) = microbatches
        logits = torch.zeros(*batch.tokens.shape, 264)
        logits[..., ord("b")] = 1.0
        logits[..., 260] = 9.0  # the model has it, the tokenizer has not
        if self.calls:
            logits[0, :, ord("x")] = self.broken
        self.calls += 1
        return [read_logits(logits, 0)]  # type: ignore[operator]


@pytest.mark.parametrize("broken", [float("nan"), float("inf"), float("-inf")])
def test_a_sample_ends_where_the_numbers_do(broken: float) -> None:
    recipe = Recipe(
        name="samples",
        steps=1,
        model=load_model("tiny-llama").model_copy(update={"vocabulary": 264}),
        data=DataConfig(shards="none"),
        batch=BatchConfig(sequences=2, length=32),
        evaluation=EvaluationConfig(prompts=("a", "a"), sample_tokens=3),
    )
    world = World.join(RankInfo(), "gloo", rendezvous(RankInfo()))
    try:
        mesh = build_mesh(Plan(), world, None, experts=False)
        first, second = PromptSampler(recipe, mesh, end_of_text=256).run(Forward(broken))
    finally:
        world.shutdown()
    assert (first.text, first.tokens, first.ended) == ("b", 1, "not finite")
    assert (second.text, second.tokens, second.ended) == ("bbb", 3, "tokens")
