"""Expert layers against one token at a time."""

from collections import Counter
from itertools import product
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn

from danlu.framework.decoder.block import Mlp
from danlu.framework.decoder.moe import AuxLossInjector, MoeLayer, Router
from danlu.parallel.expert_counts import balanced_send_counts
from danlu.spec.model import Moe
from danlu.torch_compat import TorchDispatchMode, grouped_mm

WIDTH, EXPERTS = 8, 6
Activation = Literal["swiglu", "gelu"]


def layer(activation: Activation = "swiglu", **changes: Any) -> MoeLayer:
    values: dict[str, Any] = {"experts": EXPERTS, "top_k": 2, "width": 5}
    moe = Moe.model_validate(values | changes)
    shared = Mlp(WIDTH, moe.shared * moe.width, activation, bias=False) if moe.shared else None
    made = MoeLayer(WIDTH, moe, activation, shared)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.5)
    return made


def stream(sequences: int = 3, length: int = 7, seed: int = 0) -> Tensor:
    return torch.randn(sequences, length, WIDTH, generator=torch.Generator().manual_seed(seed))


def expert_answer(made: MoeLayer, expert: int, x: Tensor) -> Tensor:
    up = x @ made.experts.up[expert]
    if made.experts.gate is None:
        return nn.functional.gelu(up) @ made.experts.down[expert]
    return (nn.functional.silu(x @ made.experts.gate[expert]) * up) @ made.experts.down[expert]


def one_by_one(made: MoeLayer, x_BSD: Tensor) -> tuple[Tensor, Tensor]:
    """What the layer answers and its auxiliary loss, by a loop over tokens."""
    moe, gate = made.router.moe, made.router.gate.weight
    rows, loss = [], torch.zeros(())
    for sequence in x_BSD:
        answers, counts, shares = [], torch.zeros(moe.experts), torch.zeros(moe.experts)
        for x in sequence:
            logits = gate @ x
            score = logits.softmax(0) if moe.score == "softmax" else logits.sigmoid()
            biased = (score + made.router.bias_E).tolist()
            size = moe.experts // moe.n_group
            groups = [range(first, first + size) for first in range(0, moe.experts, size)]
            groups.sort(key=lambda group: -sum(sorted((biased[expert] for expert in group), reverse=True)[:2]))
            open_experts = [expert for group in groups[: moe.topk_group] for expert in group]
            chosen = sorted(open_experts, key=lambda expert: -biased[expert])[: moe.top_k]
            total = sum(score[expert] for expert in chosen) if moe.normalize else 1.0
            answer = torch.zeros(WIDTH)
            for expert in chosen:
                weight = score[expert] / total * moe.routed_scaling_factor
                answer = answer + weight * expert_answer(made, expert, x)
                counts[expert] += 1
            shares = shares + logits.softmax(0)
            answers.append(answer if made.shared is None else answer + made.shared(x))
        rows.append(torch.stack(answers))
        length = len(sequence)
        load = counts * moe.experts / (moe.top_k * length)
        loss = loss + (load * shares / length).sum() * moe.balance_rate / made.router.sequences_per_step
    return torch.stack(rows), loss if moe.balance == "loss" else torch.zeros(())


def gradients(made: MoeLayer, x: Tensor) -> dict[str, Tensor]:
    found = {name: parameter.grad for name, parameter in made.named_parameters()} | {"x": x.grad}
    return {name: torch.zeros(()) if gradient is None else gradient.clone() for name, gradient in found.items()}


CASES = [
    {"activation": activation, "score": score, "normalize": normalize, "shared": shared, "balance": balance}
    for activation, (score, normalize, shared, balance) in product(
        ("swiglu", "gelu"), [("softmax", True, 0, "loss"), ("sigmoid", False, 2, "bias"), ("sigmoid", True, 1, "none")]
    )
]

CASES.append(
    {"score": "sigmoid", "shared": 1, "balance": "bias", "n_group": 3, "topk_group": 2} | {"routed_scaling_factor": 2.5}
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(str(value) for value in case.values()))
def test_answers_and_gradients_are_those_of_a_loop_over_tokens(case: dict[str, Any]) -> None:
    made = layer(**case, top_k=3, balance_rate=0.3)
    made.router.sequences_per_step = 4
    made.router.bias_E.copy_(torch.linspace(-0.3, 0.3, EXPERTS))
    weight = stream(seed=9)  # makes every element of the result count differently

    x = stream().requires_grad_()
    expected, loss = one_by_one(made, x)
    ((expected * weight).sum() + loss).backward()
    wanted = gradients(made, x)

    made.zero_grad()
    x = stream().requires_grad_()
    found = made(x)
    (found * weight).sum().backward()
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    for name, gradient in gradients(made, x).items():
        torch.testing.assert_close(
            gradient, wanted[name], rtol=1e-4, atol=1e-5, msg=lambda text, at=name: f"{at}: {text}"
        )


def test_no_token_is_dropped_however_uneven_the_load() -> None:
    made = layer()
    made.router.bias_E[4:] = 100.0  # every token goes to experts 4 and 5, four get none
    found, (expected, _) = made(stream()), one_by_one(made, stream())
    assert made.router.load_E.tolist() == [0, 0, 0, 0, 21, 21]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    found.sum().backward()
    assert made.experts.up.grad is not None
    assert made.experts.up.grad[:4].abs().max() == 0 and made.experts.up.grad[4:].abs().min() > 0


def test_the_order_of_tokens_does_not_matter() -> None:
    made, x = layer(), stream(sequences=1, length=30)
    order = torch.randperm(30, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(made(x[:, order]), made(x)[:, order])


# --- the loss that hangs on the stream


def test_an_attached_loss_has_the_gradient_of_an_added_one_to_the_bit() -> None:
    def run(attach: bool) -> tuple[Tensor | None, Tensor | None, Tensor]:
        x = torch.randn(5, generator=torch.Generator().manual_seed(1)).requires_grad_()
        w = torch.randn(5, generator=torch.Generator().manual_seed(2)).requires_grad_()
        y, loss = x * 2, (w * x).square().mean()
        if attach:
            y = AuxLossInjector.apply(y, loss)
            y.sin().sum().backward()
        else:
            (y.sin().sum() + loss).backward()
        return x.grad, w.grad, y

    (x1, w1, y1), (x2, w2, y2) = run(attach=True), run(attach=False)
    assert x1 is not None and x2 is not None and w1 is not None and w2 is not None
    assert torch.equal(y1, y2) and torch.equal(w1, w2)
    torch.testing.assert_close(x1, x2, rtol=1e-6, atol=0)


def router(**changes: Any) -> Router:
    return layer(**changes).router


def test_the_auxiliary_loss_adds_up_over_sequences() -> None:
    made = router(balance_rate=1.0)
    made.sequences_per_step = 6
    x = stream(sequences=6)
    whole = made(x)[3]
    pieces = [made(piece)[3] for piece in (x[:1], x[1:4], x[4:])]
    torch.testing.assert_close(sum(pieces), whole)


def test_an_even_router_pays_its_rate_and_a_collapsed_one_many_times_that() -> None:
    even = router(balance_rate=0.5)
    even.sequences_per_step = 3
    with torch.no_grad():
        even.gate.weight.zero_()
    assert even(stream())[3].item() == pytest.approx(0.5), "shares of 1/E, whatever the load"
    collapsed = router(balance_rate=0.5)
    collapsed.sequences_per_step = 3
    with torch.no_grad():
        collapsed.gate.weight.zero_()
        collapsed.gate.weight[:2, 0] = 1e4
    x = stream()
    x[..., 0] = 1.0
    assert collapsed(x)[3].item() == pytest.approx(0.5 * EXPERTS / 2), "two experts of six share everything"


def test_without_a_balancing_loss_there_is_none() -> None:
    for balance in ("bias", "none"):
        assert router(balance=balance)(stream())[3].item() == 0


# --- the bias


def test_the_bias_moves_the_choice_and_never_the_weight() -> None:
    made = router(normalize=False)
    x = stream()
    before = made(x)
    made.bias_E[0] = 10.0
    chosen, weights, _, _ = made(x)
    assert (chosen == 0).any(1).all() and not (before[0] == 0).any(1).all()
    scores = made.gate(x).softmax(-1).flatten(0, 1)
    torch.testing.assert_close(weights, scores.gather(1, chosen))


def test_the_bias_falls_for_busy_experts_and_rises_for_idle_ones() -> None:
    made = router(balance="bias", balance_rate=0.25)
    made.step_load_E = torch.tensor([10.0, 0.0, 5.0, 5.0, 7.0, 3.0])
    made.update_bias()
    assert made.bias_E.tolist() == [-0.25, 0.25, 0.0, 0.0, -0.25, 0.25]


def test_balancing_by_bias_evens_the_load_and_by_loss_leaves_the_bias_alone() -> None:
    made, x = router(balance="bias", balance_rate=0.02), stream(sequences=16, length=16)
    made.bias_E[0] = 0.3
    uneven = []
    for _ in range(40):
        made(x)
        made.step_load_E = made.pop_load()
        assert made.load_E.abs().sum() == 0
        uneven.append(float(made.step_load_E.max() / made.step_load_E.mean()))
        made.update_bias()
    assert uneven[-1] < 1.25 < 2.5 < uneven[0]
    other = router(balance="loss")
    other(x)
    other.step_load_E = other.pop_load()
    other.update_bias()
    assert other.bias_E.abs().sum() == 0


def test_every_choice_is_counted() -> None:
    made = router(top_k=3)
    chosen = torch.cat([made(stream(seed=seed))[0] for seed in range(2)])
    assert made.load_E.tolist() == torch.bincount(chosen.flatten(), minlength=EXPERTS).tolist()
    assert made.load_E.sum() == 2 * 3 * 7 * 3


# --- loads that a dry run takes for even


@pytest.mark.parametrize(("copies", "experts", "ranks"), [(64, 8, 4), (70, 8, 4), (5, 8, 4), (2048, 12_000, 375)])
def test_an_even_load_is_the_same_for_every_rank(copies: int, experts: int, ranks: int) -> None:
    sent = [balanced_send_counts(copies, experts, ranks, rank) for rank in range(ranks)]
    assert all(sum(map(sum, rows)) == copies for rows in sent), "every copy is sent"
    for receiver in range(ranks):
        coming = [rows[receiver] for rows in sent]
        assert coming == sent[receiver], "what a rank gets is what it sends"
        per_expert = [sum(column) for column in zip(*coming, strict=True)]
        assert sum(per_expert) == copies
        assert max(per_expert) - min(per_expert) <= 2


def test_a_group_is_chosen_by_its_two_best_experts_and_none_outside_it() -> None:
    """One group has the best expert of all, another the best two together."""
    router = Router(EXPERTS, Moe(experts=EXPERTS, top_k=2, width=5, score="sigmoid", n_group=3, topk_group=1))
    with torch.no_grad():
        router.gate.weight.copy_(torch.eye(EXPERTS))
    logits = torch.tensor([[[9.0, -9.0, 1.0, 1.1, 0.0, 0.1]]])
    chosen, weights, counts, _ = router(logits)
    assert sorted(chosen[0].tolist()) == [2, 3]
    assert counts.tolist() == [0, 0, 1, 1, 0, 0]
    torch.testing.assert_close(weights.sum(), torch.ones(()))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_group": 4}, "`n_group` must divide `experts` \\(6\\)"),
        ({"n_group": 3, "topk_group": 4}, "`topk_group` must be at most `n_group` \\(3\\)"),
        ({"n_group": 3, "topk_group": 1, "top_k": 3}, "`top_k` must be at most the 2 experts"),
        ({"n_group": 6, "topk_group": 3}, "`n_group` must leave two experts to a group"),
    ],
)
def test_groups_that_cannot_be_chosen_from_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        layer(**changes)


class Calls(TorchDispatchMode):
    """Counts operators."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names[str(function)] += 1
        return function(*args, **kwargs or {})


@pytest.mark.skipif(grouped_mm is None, reason="torch 2.9 has no grouped product")
@pytest.mark.parametrize("balance", ["loss", "bias", "none"])
@pytest.mark.parametrize("bias", [False, True])
def test_a_layer_waits_for_no_value_of_its_device(balance: str, bias: bool) -> None:
    """On a device whose tensors have no values, where whatever reads one fails; forward and backward."""
    moe = Moe.model_validate({"experts": 8, "top_k": 2, "width": 32, "balance": balance, "bias": bias, "shared": 1})
    made = MoeLayer(64, moe, "swiglu", Mlp(64, 32, "swiglu", bias=False)).to(torch.bfloat16).to("meta")
    x = torch.empty(2, 16, 64, dtype=torch.bfloat16, device="meta", requires_grad=True)
    with Calls() as calls:
        made(x).sum().backward()
    assert x.grad is not None and all(each.grad is not None for each in made.experts.parameters())
    grouped = sum(count for name, count in calls.names.items() if "grouped_mm" in name)
    assert grouped == 9, "gate, up and down, and both gradients of each: no product for every expert"
    assert not [name for name in calls.names if "_local_scalar_dense" in name or "nonzero" in name]
    with pytest.raises((RuntimeError, NotImplementedError)):
        made.router.load_E.tolist()  # the device would notice
