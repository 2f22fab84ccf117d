"""The decoder against a slow one written from the definition: one position, one head, one complex number at a time."""

from typing import Any

import pytest
import torch
from torch import Tensor

from danlu.cost.parameter_count import count_parameters
from danlu.framework.decoder.decoder import Decoder
from danlu.framework.decoder.rope import apply_rope
from danlu.parallel.sequence_shard import SequenceShard
from danlu.spec.catalog import catalog_entries
from danlu.spec.load import load_model
from danlu.spec.model import Model
from danlu.spec.plan import Degrees, PipelineConfig, Plan

GPT: dict[str, Any] = {"norm": "layer", "position": "learned", "activation": "gelu", "bias": True}
VARIANTS: dict[str, dict[str, Any]] = {
    "gpt": GPT,
    "gpt, tied": GPT | {"tied": True},
    "llama": {},
    "llama, grouped heads": {"kv_heads": 2, "mlp_width": 24},
    "llama, one key-value head, wide heads, tied": {"kv_heads": 1, "head_width": 6, "rope_theta": 500.0, "tied": True},
}


def tiny(**changes: Any) -> Model:
    values = {"vocabulary": 19, "layers": 3, "width": 16, "heads": 4, "sequence": 12}
    return Model.model_validate(values | changes)


def decoder(model: Model, seed: int = 0) -> Decoder:
    """A decoder in fp64 with every parameter far from its usual first value, norms and biases included."""
    made = Decoder(model).double()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.4 + 0.1)
    return made


def tokens(model: Model, length: int = 9, sequences: int = 2) -> Tensor:
    return torch.randint(model.vocabulary, (sequences, length), generator=torch.Generator().manual_seed(5))


# --- the slow decoder


class Slow:
    """Reads the weights by name and follows the textbook; nothing is shared with the code under test."""

    def __init__(self, model: Model, weights: dict[str, Tensor]) -> None:
        self.model, self.weights = model, weights

    def __call__(self, sequence: list[int]) -> Tensor:
        """Scores of every position of one sequence."""
        table = self.weights["embed.token.weight"]
        stream = [table[token].clone() for token in sequence]
        if self.model.position == "learned":
            stream = [x + self.weights["embed.position.weight"][place] for place, x in enumerate(stream)]
        for layer in range(self.model.layers):
            name = f"blocks.{layer}"
            found = self.attention(f"{name}.attention", [self.norm(f"{name}.attention_norm", x) for x in stream])
            stream = [x + y for x, y in zip(stream, found, strict=True)]
            stream = [x + self.mlp(f"{name}.mlp", self.norm(f"{name}.mlp_norm", x)) for x in stream]
        head = table if self.model.tied else self.weights["head.score.weight"]
        return torch.stack([head @ self.norm("head.norm", x) for x in stream])

    def linear(self, name: str, x: Tensor) -> Tensor:
        y = self.weights[f"{name}.weight"] @ x
        return y + self.weights[f"{name}.bias"] if self.model.bias else y

    def norm(self, name: str, x: Tensor) -> Tensor:
        weight = self.weights[f"{name}.weight"]
        if self.model.norm == "rms":
            return x / (x.square().mean() + self.model.norm_epsilon).sqrt() * weight
        centred = x - x.mean()
        return (
            centred / (centred.square().mean() + self.model.norm_epsilon).sqrt() * weight + self.weights[f"{name}.bias"]
        )

    def mlp(self, name: str, x: Tensor) -> Tensor:
        up = self.linear(f"{name}.up", x)
        if self.model.activation == "swiglu":
            gate = self.linear(f"{name}.gate", x)
            return self.linear(f"{name}.down", gate / (1 + (-gate).exp()) * up)
        return self.linear(f"{name}.down", up * (1 + torch.erf(up / 2**0.5)) / 2)

    def attention(self, name: str, xs: list[Tensor]) -> list[Tensor]:
        width, heads, groups = self.model.head_dim, self.model.heads, self.model.num_kv_heads
        q, k, v = ([self.linear(f"{name}.{part}", x) for x in xs] for part in "qkv")
        mixed = [[] for _ in xs]  # type: list[list[Tensor]]
        for head in range(heads):
            own = slice(head * width, (head + 1) * width)
            group = head * groups // heads
            shared = slice(group * width, (group + 1) * width)
            for here in range(len(xs)):
                query = self.turned(q[here][own], here)
                scores = [query @ self.turned(k[there][shared], there) / width**0.5 for there in range(here + 1)]
                shares = torch.stack(scores).softmax(0)
                mixed[here].append(sum(share * v[there][shared] for there, share in enumerate(shares)))  # type: ignore[arg-type]
        return [self.linear(f"{name}.o", torch.cat(parts)) for parts in mixed]

    def turned(self, x: Tensor, place: int) -> Tensor:
        """Feature i and feature i + width/2 are one complex number; the position turns it."""
        if self.model.position != "rope":
            return x
        half = len(x) // 2
        number = torch.complex(x[:half], x[half:])
        speeds = torch.tensor([self.model.rope_theta ** (-i / half) for i in range(half)], dtype=torch.float64)
        turned = number * torch.polar(torch.ones_like(speeds), place * speeds)
        return torch.cat((turned.real, turned.imag))


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS.keys())
def test_scores_are_those_of_the_definition(changes: dict[str, Any]) -> None:
    model = tiny(**changes)
    made, batch = decoder(model), tokens(model)
    slow = Slow(model, {name: weight.detach() for name, weight in made.state_dict().items()})
    expected = torch.stack([slow(row) for row in batch.tolist()])
    # Rotary angles are reckoned in fp32, whatever the dtype of the stream.
    tolerance = 1e-11 if model.position == "learned" else 2e-5
    torch.testing.assert_close(made(batch), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS.keys())
def test_no_position_sees_a_later_one(changes: dict[str, Any]) -> None:
    model = tiny(**changes)
    made, batch = decoder(model), tokens(model)
    other = batch.clone()
    other[:, 5] = (other[:, 5] + 1) % model.vocabulary
    before, after = made(batch), made(other)
    assert torch.equal(before[:, :5], after[:, :5])
    assert (before[:, 5:] != after[:, 5:]).any(-1).all(), "every later position sees the change"


def test_rotary_scores_depend_on_the_distance_alone() -> None:
    generator = torch.Generator().manual_seed(1)
    q, k = (torch.randn(8, generator=generator).expand(1, 20, 1, 8) for _ in range(2))
    scores = apply_rope(q, 100.0)[0, :, 0] @ apply_rope(k, 100.0)[0, :, 0].T
    for distance in range(-10, 11):
        diagonal = scores.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[0].expand_as(diagonal), rtol=1e-4, atol=1e-5)
    assert scores[0].std() > 0.1, "and it does depend on the distance"


def test_rotary_embedding_keeps_dtype_and_length() -> None:
    x = torch.randn(2, 7, 3, 8, generator=torch.Generator().manual_seed(2))
    turned = apply_rope(x, 1e4)
    torch.testing.assert_close(turned.norm(dim=-1), x.norm(dim=-1))
    assert torch.equal(turned[:, 0], x[:, 0]), "the first position is not turned"
    assert apply_rope(x.bfloat16(), 1e4).dtype == torch.bfloat16


# --- shapes and names


@pytest.mark.parametrize("name", sorted(catalog_entries("models")))
def test_a_built_model_has_the_parameters_that_were_counted(name: str) -> None:
    model = load_model(name)
    with torch.device("meta"):
        built = Decoder(model)
    assert sum(parameter.numel() for parameter in built.parameters()) == count_parameters(model)


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS.keys())
def test_variants_have_the_parameters_that_were_counted(changes: dict[str, Any]) -> None:
    model = tiny(**changes)
    assert sum(parameter.numel() for parameter in Decoder(model).parameters()) == count_parameters(model)


@pytest.mark.parametrize(
    "plan",
    [
        Plan(degrees=Degrees(pp=2)),
        Plan(degrees=Degrees(pp=3)),
        Plan(degrees=Degrees(pp=2), pipeline=PipelineConfig(layers=(1, 4))),
        Plan(degrees=Degrees(pp=2), pipeline=PipelineConfig(schedule="interleaved", stages_per_rank=2)),
    ],
    ids=["even", "uneven", "as the plan says", "several a rank"],
)
@pytest.mark.parametrize("changes", [GPT, {"kv_heads": 2}], ids=["gpt", "llama"])
def test_stages_one_after_the_other_are_the_model(plan: Plan, changes: dict[str, Any]) -> None:
    model = tiny(**(changes | {"layers": 5}))
    whole, batch = decoder(model), tokens(model)
    weights = whole.state_dict()
    names: list[str] = []
    stream = batch
    for stage, layers in enumerate(plan.stage_layers(model.layers)):
        part = Decoder(model, layers, first=stage == 0, last=stage == plan.num_stages - 1).double()
        part.load_state_dict({name: weights[name] for name in part.state_dict()})
        names += part.state_dict()
        stream = part(stream)
    assert sorted(names) == sorted(weights), "every parameter lives in one stage, under its global name"
    assert torch.equal(stream, whole(batch))


def test_a_tied_model_has_one_table_and_stays_tied_after_its_parameters_are_replaced() -> None:
    made = Decoder(tiny(tied=True))
    assert made.embed is not None and made.head is not None
    assert made.head.score.weight is made.embed.token.weight
    assert "head.score.weight" not in dict(made.named_parameters())
    made.embed.token.weight = torch.nn.Parameter(made.embed.token.weight.detach() * 2)
    made.tie_weights()
    assert made.head.score.weight is made.embed.token.weight


def test_a_part_of_a_sequence_gets_the_learned_places_of_that_part() -> None:
    model = tiny(**GPT)
    embed = decoder(model).embed
    assert embed is not None
    batch = tokens(model, length=12)
    whole = embed(batch)
    embed.shard = SequenceShard(2, 3)
    assert torch.equal(embed(batch[:, 8:]), whole[:, 8:])
    embed.shard = SequenceShard(1, 3, zigzag=True)
    assert torch.equal(embed(batch[:, [2, 3, 8, 9]]), whole[:, [2, 3, 8, 9]])
