"""Text from a model: what is cached changes nothing, what is drawn is what was asked for."""

import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from made_hf import make_hf
from torch import Tensor, nn

from danlu.framework.decoder.decoder import Decoder
from danlu.framework.decoder.kv_cache import KVCache
from danlu.framework.decoder.moe import Router
from danlu.framework.generation import DecoderSession, PrefixSession, TransformersSession, generate, open_session
from danlu.framework.hf.compare import load_imported_decoder
from danlu.framework.hf.convert import export_hf, import_hf
from danlu.framework.sampling import NonFiniteLogitsError, Sampling, choose_token
from danlu.framework.weights import WEIGHTS_FILE_PREFIX
from danlu.spec import Model, Moe
from danlu.storage.checkpoint.safetensors_io import SafetensorsReader

GREEDY = Sampling(temperature=0)
GPT: dict[str, Any] = {"norm": "layer", "position": "learned", "activation": "gelu", "bias": True}
MOE = Moe(experts=6, top_k=2, width=24)
MLA = {"q_lora_rank": 20, "kv_lora_rank": 12, "qk_rope_head_dim": 6, "qk_nope_head_dim": 10, "v_head_dim": 8}
VARIANTS: dict[str, dict[str, Any]] = {
    "dense": {},
    "dense, tied, grouped heads": {"kv_heads": 2, "tied": True},
    "one key-value head, wide heads, head norms": {"kv_heads": 1, "head_width": 12, "qk_norm": True},
    "scaled positions": {"rope_scaling": {"factor": 8.0, "original": 8}},
    "window": {"kv_heads": 2, "window": 6},
    "windows and every second layer without, positions of their own": {
        "window": 5,
        "global_every": 2,
        "local_rope_theta": 500.0,
        "rope_scaling": {"kind": "linear", "factor": 4.0},
    },
    "window in the last layer, sinks": {"window": 7, "global_first": 2, "sinks": True, "kv_heads": 2},
    "capped scores and logits, scaled queries": {"score_softcap": 3.0, "logit_softcap": 5.0, "query_scalar": 20.0},
    "gpt-oss": {
        "kv_heads": 2,
        "window": 6,
        "global_every": 2,
        "sinks": True,
        "bias": True,
        "activation": "clamped_swiglu",
        "moe": MOE.model_copy(update={"bias": True}),
    },
    "gemma's norms": {
        "zero_centered_norm": True,
        "post_norms": True,
        "scaled_embedding": True,
        "qk_norm": True,
        "activation": "geglu",
    },
    "latent": {"mla": MLA},
    "latent keys and values alone, wide values, experts": {
        "mla": {"kv_lora_rank": 12, "qk_rope_head_dim": 4, "qk_nope_head_dim": 6, "v_head_dim": 14},
        "moe": MOE,
    },
    "latent, scaled positions": {
        "mla": MLA,
        "rope_scaling": {"kind": "yarn", "factor": 8.0, "original": 8, "mscale": 1.0, "mscale_all_dim": 0.7},
    },
    "gpt": GPT,
    "gpt, tied": GPT | {"tied": True},
    "experts": {"moe": MOE},
    "experts, shared, first layer dense, grouped heads": {
        "kv_heads": 2,
        "moe": MOE.model_copy(update={"shared": 1, "dense_layers": 1, "score": "sigmoid", "balance": "bias"}),
    },
}


def decoder(**changes: Any) -> Decoder:
    values = {"vocabulary": 61, "layers": 3, "width": 32, "heads": 4, "sequence": 48} | changes
    made = Decoder(Model.model_validate(values))
    generator = torch.Generator().manual_seed(3)
    one = not changes.get("zero_centered_norm", False)
    with torch.no_grad():
        for parameter in made.parameters():
            width = parameter.shape[-1] ** 0.5 if parameter.ndim > 1 else 3.0
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / width + one * (parameter.ndim == 1))
        for module in made.modules():
            if isinstance(module, Router):
                module.bias_E.copy_(torch.randn(module.bias_E.shape, generator=generator) * 0.1)
    return made


def tokens(rows: int, length: int, vocabulary: int = 61) -> Tensor:
    return torch.randint(vocabulary, (rows, length), generator=torch.Generator().manual_seed(7))


@pytest.mark.parametrize("variant", VARIANTS)
@torch.no_grad()
def test_cached_logits_are_those_of_a_full_forward_at_every_position(variant: str) -> None:
    """A prompt at once, then single tokens, then several at once: every kind of call a session has."""
    model = decoder(**VARIANTS[variant])
    tokens_BS = tokens(2, 40)
    expected = model(tokens_BS)
    session = DecoderSession(model, 2, 40)
    at = 0
    for step in [9, *[1] * 20, 4, 1, 6]:
        found = session.extend(tokens_BS[:, at : at + step])
        at += step
        difference = (found - expected[:, at - 1]).abs().max()
        assert difference <= 1e-5, (variant, at, float(difference))
        assert session.length == at
    assert at == 40


def test_one_position_after_another_from_the_first() -> None:
    model = decoder(kv_heads=2)
    tokens_BS = tokens(1, 12)
    session = DecoderSession(model, 1, 12)
    with torch.no_grad():
        found = torch.stack([session.extend(tokens_BS[:, at : at + 1]) for at in range(12)], dim=1)
        assert (found - model(tokens_BS)).abs().max() <= 1e-5


def test_a_cache_that_is_full_says_so() -> None:
    cache = KVCache((1, 4, 1, 2), torch.float32, torch.device("cpu"))
    for length in (3, 4):
        cache.append(torch.ones(1, length - cache.length, 1, 2), torch.ones(1, length - cache.length, 1, 2))
    with pytest.raises(ValueError, match="room for 4 positions, but 5 are needed"):
        cache.append(torch.ones(1, 1, 1, 2), torch.ones(1, 1, 1, 2))


@pytest.mark.parametrize(
    "name", ["llama", "llama, long context", "qwen2", "qwen3", "mixtral", "deepseek v3 tied, long context"]
)
def test_greedy_tokens_are_those_that_transformers_generates_from_an_export(name: str, tmp_path: Path) -> None:
    import transformers

    model = import_hf(make_hf(tmp_path / "source", name), tmp_path / "out").model
    export_hf(model, SafetensorsReader(tmp_path / "out", WEIGHTS_FILE_PREFIX).read, tmp_path / "export")
    prompt = [5, 80, 2, 33, 33, 9]
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "export", dtype=torch.float32).eval()
    expected = theirs.generate(
        torch.tensor([prompt]), max_new_tokens=40, do_sample=False, eos_token_id=None, pad_token_id=0
    )[0, len(prompt) :].tolist()
    ours = load_imported_decoder(tmp_path / "out", model)
    assert [step[0] for step in generate(ours, prompt, GREEDY, tokens=40)] == expected
    assert len(set(expected)) > 3, "a model that repeats one token proves little"


class Plain(nn.Module):
    """A module that Danlu knows nothing of."""

    def __init__(self, inner: Decoder) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, tokens_BS: Tensor) -> Tensor:
        return self.inner(tokens_BS)


def test_any_module_generates_the_same_without_a_cache_and_says_what_that_costs() -> None:
    model = decoder()
    expected = list(generate(model, [1, 2, 3], Sampling(), tokens=12, count=2))
    with pytest.warns(RuntimeWarning, match="Plain has no KV cache: .* the last of 15 costs 15 times"):
        found = list(generate(Plain(model), [1, 2, 3], Sampling(), tokens=12, count=2))
    assert found == expected
    with pytest.warns(RuntimeWarning):
        assert isinstance(open_session(Plain(model), 1, 4), PrefixSession)


def test_a_model_of_transformers_uses_its_own_cache(tmp_path: Path) -> None:
    import transformers

    source = make_hf(tmp_path / "source", "qwen3")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    ours = load_imported_decoder(tmp_path / "out", import_hf(source, tmp_path / "out").model)
    assert isinstance(open_session(theirs, 1, 4), TransformersSession)
    lengths = []
    theirs.model.layers[0].register_forward_hook(lambda _, __, output: lengths.append(output.shape[1]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = list(generate(theirs, [4, 9, 70], GREEDY, tokens=20))
    assert found == list(generate(ours, [4, 9, 70], GREEDY, tokens=20))
    assert lengths == [3, *[1] * 19]


def test_a_sample_depends_on_its_seed_and_number_alone() -> None:
    model = decoder()
    one = [step[0] for step in generate(model, [1], Sampling(), tokens=16, seed=4)]
    three = list(generate(model, [1], Sampling(), tokens=16, seed=4, count=3))
    assert [step[0] for step in three] == one
    assert len({tuple(step[row] for step in three) for row in range(3)}) == 3
    assert [step[0] for step in generate(model, [1], Sampling(), tokens=16, seed=5)] != one


def test_a_sample_ends_with_its_text_and_the_others_continue() -> None:
    model = decoder()
    free = list(generate(model, [1], Sampling(), tokens=30, count=3))
    end = free[4][1]
    bounded = list(generate(model, [1], Sampling(), tokens=30, count=3, end_of_text=end))
    for row in range(3):
        drawn = [step[row] for step in free]
        kept = drawn[: drawn.index(end)] if end in drawn else drawn
        assert [step[row] for step in bounded if step[row] is not None] == kept
    alone = list(generate(model, [1], GREEDY, tokens=30, end_of_text=next(generate(model, [1], GREEDY, tokens=1))[0]))
    assert alone == []


def test_tokens_that_the_tokenizer_does_not_have_are_never_drawn() -> None:
    drawn = {
        token
        for step in generate(decoder(), [1], Sampling(temperature=50.0), tokens=40, vocabulary=5)
        for token in step
    }
    assert drawn == {0, 1, 2, 3, 4}


def test_generating_leaves_no_trace_in_the_model() -> None:
    model = decoder(moe=MOE).train()
    routers = [module for module in model.modules() if isinstance(module, Router)]
    model(tokens(2, 8))
    before = [router.load_E.clone() for router in routers]
    list(generate(model, [1, 2], Sampling(), tokens=5))
    assert model.training
    assert all(torch.equal(router.load_E, load) for router, load in zip(routers, before, strict=True))
    for step in generate(model, [1, 2], Sampling(), tokens=5):
        assert torch.is_grad_enabled(), step


# --- what is drawn


def draw(logits: list[float], sampling: Sampling, times: int = 800) -> dict[int, float]:
    """The share of every token among many draws."""
    generator = torch.Generator().manual_seed(11)
    counts = Counter(choose_token(torch.tensor(logits), sampling, generator) for _ in range(times))
    return {token: count / times for token, count in sorted(counts.items())}


LOGITS = [0.0, 2.0, 1.0, -1.0, 0.5]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_shares_are_those_of_the_softmax_at_this_temperature(temperature: float) -> None:
    expected = (torch.tensor(LOGITS) / temperature).softmax(0)
    found = draw(LOGITS, Sampling(temperature=temperature))
    assert all(abs(found.get(token, 0.0) - float(share)) < 0.06 for token, share in enumerate(expected))


def test_temperature_zero_takes_the_most_likely_token() -> None:
    assert draw(LOGITS, Sampling(temperature=0), times=50) == {1: 1.0}


def test_top_k_keeps_exactly_k() -> None:
    assert set(draw(LOGITS, Sampling(top_k=2))) == {1, 2}
    shares = torch.tensor([2.0, 1.0]).softmax(0)
    assert abs(draw(LOGITS, Sampling(top_k=2))[1] - float(shares[0])) < 0.06
    assert draw(LOGITS, Sampling(top_k=1), times=50) == {1: 1.0}


def test_top_p_keeps_the_fewest_tokens_that_reach_it() -> None:
    shares = torch.tensor([0.5, 0.25, 0.125, 0.0625, 0.0625])
    logits = shares.log().tolist()
    for top_p, kept in ((0.3, 1), (0.5, 1), (0.51, 2), (0.74, 2), (0.8, 3), (0.9, 4), (0.99, 5)):
        found = draw(logits, Sampling(top_p=top_p))
        assert set(found) == set(range(kept)), (top_p, found)
        total = float(shares[:kept].sum())
        assert all(abs(found[token] - float(shares[token]) / total) < 0.06 for token in found)


def test_top_k_comes_before_top_p() -> None:
    """Of the two most likely, renormalized, the first alone reaches 0.6: of all tokens it would not."""
    logits = torch.tensor([0.4, 0.2, 0.2, 0.1, 0.1]).log().tolist()
    assert set(draw(logits, Sampling(top_k=2, top_p=0.6))) == {0}
    assert set(draw(logits, Sampling(top_p=0.59))) == {0, 1}


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("sampling", [GREEDY, Sampling()])
def test_logits_that_are_no_numbers_are_an_error(value: float, sampling: Sampling) -> None:
    with pytest.raises(NonFiniteLogitsError, match="1 of 3 logits are not finite"):
        choose_token(torch.tensor([0.0, value, 1.0]), sampling, torch.Generator())


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"temperature": -0.1}, "`temperature` must be 0 or more"),
        ({"temperature": float("nan")}, "`temperature` must be"),
        ({"top_k": -1}, "`top_k` must be 0 or more"),
        ({"top_p": 0.0}, "`top_p` must be above 0"),
        ({"top_p": 1.5}, "at most 1, but is 1.5"),
    ],
)
def test_settings_without_a_meaning_are_refused(values: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Sampling(**values)


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one token"):
        next(generate(decoder(), [], Sampling(), tokens=1))
