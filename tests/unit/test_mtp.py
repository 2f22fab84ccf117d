"""Multi-token prediction: what its modules read and predict, and a training run beside a plain loop, written out."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from deviations import relative, whole_parameters, worst
from made_loops import MOE, SHAPE, Run, one_rank, recipe, samples_of
from made_meshes import place_of
from plain_loop import Objective, train_plainly
from torch import Tensor, nn

from danlu.cost.parameter_count import count_parameters, flops_per_token
from danlu.framework.batch_loader import BatchLoader
from danlu.framework.decoder.decoder import Decoder
from danlu.framework.tokens_ahead import shift_ahead
from danlu.spec.check import find_problems, parsed_without_file
from danlu.spec.model import Model, Mtp
from danlu.spec.parameters import decoder_parameters
from danlu.spec.plan import Degrees, PipelineConfig, Plan
from danlu.spec.recipe import BatchConfig

BAR = 1e-5
AHEAD = Mtp(depth=2, weight=0.6)
NONE = -100


@pytest.fixture(scope="module", autouse=True)
def _one_rank() -> Iterator[None]:
    with one_rank():
        yield


class Ahead(Objective):
    """Section 2.2 of the report on DeepSeek-V3: module k of a sequence of n tokens works on its first n - k."""

    def __init__(self, mtp: Mtp) -> None:
        self.mtp = mtp
        self.losses: list[list[float]] = []
        """By step, of every module."""
        self.seen = 0

    def further(self, model: nn.Module, rows: Tensor, sequences: int) -> Tensor:
        losses = ahead_losses(model, rows, self.mtp.depth, sequences)
        if self.seen == 0:
            self.losses.append([0.0] * self.mtp.depth)
        self.losses[-1] = [a + b.item() for a, b in zip(self.losses[-1], losses, strict=True)]
        self.seen = (self.seen + len(rows)) % sequences
        return self.mtp.weight / self.mtp.depth * sum(losses)  # type: ignore[return-value]


def normed(x: Tensor, norm: nn.Module, epsilon: float = 1e-5) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + epsilon).sqrt() * norm.weight  # type: ignore[operator]


def ahead_losses(model: nn.Module, rows: Tensor, depth: int, sequences: int) -> list[Tensor]:
    """The mean loss of every module over `sequences` like these rows, as far as these rows contribute to it."""
    assert isinstance(model, Decoder) and model.embed is not None and model.head is not None and model.mtp is not None
    table, out = model.embed.token.weight, model.head.score.weight
    x = model.embed(rows[:, :-1])
    for block in model.blocks.values():
        x = block(x)
    x = normed(x, model.head.norm)
    losses = []
    for k in range(1, depth + 1):
        module = model.mtp[k - 1]
        kept = rows.shape[1] - 1 - k  # positions whose token k + 1 places ahead is known
        joined = [normed(table[rows[:, k : k + kept]], module.embed_norm), normed(x[:, :kept], module.hidden_norm)]
        y = module.block(torch.cat(joined, dim=-1) @ module.project.weight.T)
        x = normed(y, module.norm)
        wanted = rows[:, k + 1 : k + 1 + kept]
        total = F.cross_entropy((x @ out.T).flatten(0, 1), wanted.flatten(), reduction="sum")
        losses.append(total / (sequences * kept))
    return losses


@pytest.mark.parametrize(
    ("kind", "microbatches"),
    [
        ("dense", 4),
        pytest.param("dense", 1, marks=pytest.mark.full),
        ("tied", 4),
        pytest.param("tied", 1, marks=pytest.mark.full),
        pytest.param("experts", 4, marks=pytest.mark.full),
        ("experts", 1),
        pytest.param("learned positions", 4, marks=pytest.mark.full),
        ("learned positions", 1),
    ],
)
def test_a_run_equals_the_plain_loop(kind: str, microbatches: int) -> None:
    changes = {
        "dense": {"kv_heads": 2},
        "tied": {"tied": True},
        # Balance counts positions without a target too, which the oracle does not have.
        "experts": {"moe": MOE.model_copy(update={"balance": "none"})},
        "learned positions": {"position": "learned"},
    }[kind]
    made = recipe(Model.model_validate(SHAPE | changes | {"mtp": AHEAD}))
    run = Run(made, Plan(microbatches=microbatches), samples_of(made))
    aim = Ahead(AHEAD)
    plain = train_plainly(made, run.plain, run.samples, microbatches, lambda first: aim)
    run.train()
    assert relative([each.loss for each in run.reports], plain.losses) <= BAR
    assert relative([each.norm for each in run.reports], plain.norms) <= BAR
    found = [loss for each in run.reports for loss in each.mtp_losses or ()]
    assert relative(found, [loss for step in aim.losses for loss in step]) <= BAR
    parameters = whole_parameters(run.state)
    assert parameters.keys() == {name for name, _ in run.plain.named_parameters()}
    assert worst(float((parameters[name] - p.detach()).abs().max()) for name, p in run.plain.named_parameters()) <= BAR


def test_the_plain_loop_notices_the_losses_of_the_modules() -> None:
    """The comparison above can fail: their gradients move what the main loss moves too."""
    made, light = (recipe(Model(**SHAPE, mtp=Mtp(depth=2, weight=weight))) for weight in (0.6, 0.5))
    run = Run(made, Plan(), samples_of(made))
    plain = train_plainly(light, run.plain, run.samples, 1, lambda first: Ahead(light.decoder.mtp or AHEAD))
    run.train()
    assert relative([each.norm for each in run.reports], plain.norms) > 100 * BAR


def test_modules_read_and_predict_tokens_further_ahead() -> None:
    inputs, targets = shift_ahead(np.array([[3, 4, 5, 6, 7]]), depth=2)
    assert inputs.tolist() == [[[4, 5, 6, 7], [5, 6, 7, 0]]]
    assert targets.tolist() == [[[5, 6, 7, NONE], [6, 7, NONE, NONE]]]


def test_no_target_is_in_another_document_or_uncounted() -> None:
    tokens = np.array([[3, 4, 5, 6, 7, 8, 9]])
    ends = np.array([[0, 0, 0, 1, 0, 0, 0]], dtype=bool)
    counted = np.array([[1, 1, 0, 1, 1, 1, 1]], dtype=bool)
    _, targets = shift_ahead(tokens, 2, counted, ends)
    assert targets.tolist() == [[[NONE, 6, NONE, NONE, 9, NONE], [6, NONE, NONE, NONE, NONE, NONE]]]


def test_documents_in_one_row_are_as_if_alone() -> None:
    model = Decoder(Model(**SHAPE, mtp=AHEAD))
    assert model.mtp_losses is not None
    rows = torch.randint(0, 64, (1, 13), generator=torch.Generator().manual_seed(3))
    ends = np.zeros((1, 13), dtype=bool)
    ends[0, 4] = True  # documents of five and of eight tokens
    inputs, targets = (torch.from_numpy(each) for each in shift_ahead(rows.numpy(), 2, None, ends))
    positions = torch.tensor([[*range(5), *range(7)]])
    model.mtp_losses.counted_K = torch.ones(2)
    model(rows[:, :-1], positions, inputs, targets)
    packed = model.mtp_losses.pop(rows.device)
    alone = [
        [loss * (document.shape[1] - 1 - k) for k, loss in enumerate(ahead_losses(model, document, 2, 1), start=1)]
        for document in (rows[:, :5], rows[:, 5:])
    ]
    torch.testing.assert_close(packed, torch.stack([torch.stack(each) for each in alone]).sum(0))


def test_shards_of_a_sequence_have_targets_from_beyond_their_border() -> None:
    class Numbers:
        def read_samples(self, indices: np.ndarray) -> np.ndarray:  # type: ignore[type-arg]
            return np.stack([np.arange(13) + index for index in indices])

    batch = BatchConfig(sequences=2, length=12)
    whole = BatchLoader(Numbers(), batch, 1000, place_of(0), tokens_ahead=2).at(0).ahead  # type: ignore[arg-type]
    shards = [
        BatchLoader(Numbers(), batch, 1000, place_of(rank, cp=3), tokens_ahead=2).at(0).ahead  # type: ignore[arg-type]
        for rank in range(3)
    ]
    assert whole is not None and all(each is not None for each in shards)
    assert torch.equal(torch.cat([each.tokens for each in shards if each], dim=-1), whole.tokens)
    assert torch.equal(torch.cat([each.targets for each in shards if each], dim=-1), whole.targets)
    assert whole.targets[0, 0].tolist() == [*range(2, 13), NONE]
    assert whole.targets[1, 1].tolist() == [*range(4, 14), NONE, NONE]


@pytest.mark.parametrize("changes", [{}, {"moe": MOE}, {"norm": "layer"}, {"tied": True}])
def test_parameters_are_named_and_counted_without_building_the_model(changes: dict[str, object]) -> None:
    model = Model.model_validate(SHAPE | changes | {"mtp": AHEAD})
    with torch.device("meta"):
        built = {name: tuple(parameter.shape) for name, parameter in Decoder(model).named_parameters()}
    assert built == dict(decoder_parameters(model))
    assert count_parameters(model) == sum(int(np.prod(shape)) for shape in built.values())


def test_flops_are_those_of_a_layer_a_projection_and_another_head() -> None:
    with_two, without = (Model(**SHAPE, mtp=mtp) for mtp in (AHEAD, None))
    width, length = with_two.width, 16
    more = flops_per_token(with_two, length) - flops_per_token(without, length)
    layer = 4 * width**2 + 3 * width * with_two.mlp_dim + 2 * width
    expected = 2 * (6 * (layer + 3 * width + 2 * width**2 + with_two.vocabulary * width) + 6 * width * length)
    assert more == pytest.approx(expected, rel=1e-12)


def test_evaluation_and_sampling_do_not_run_the_modules() -> None:
    model = Decoder(Model(**SHAPE, mtp=AHEAD))
    tokens = torch.zeros(1, 8, dtype=torch.int64)
    before = model(tokens)
    with torch.no_grad():
        for parameter in model.mtp.parameters():  # type: ignore[union-attr]
            parameter.fill_(float("nan"))
    assert torch.equal(model(tokens), before)


def test_a_schedule_that_splits_the_backward_pass_is_refused() -> None:
    made = recipe(Model(**SHAPE | {"layers": 4}, mtp=AHEAD))
    for schedule, refused in (("zbv", True), ("zero-bubble", True), ("interleaved", False)):
        pipeline = PipelineConfig(schedule=schedule, stages_per_rank=2)  # type: ignore[arg-type]
        plan = Plan(degrees=Degrees(pp=2), microbatches=4, pipeline=pipeline)
        problems = find_problems(parsed_without_file(made), parsed_without_file(plan))
        found = [problem for problem in problems if "multi-token" in problem.message]
        assert bool(found) == refused, schedule
