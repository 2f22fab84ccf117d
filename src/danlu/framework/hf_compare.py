"""The same tokens through `transformers` and through Danlu's own model: the proof that a model came over whole."""

import gc
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from danlu.framework.transformer import Decoder
from danlu.framework.weights import load_weights
from danlu.spec.model import Model

TOKENS = 512
"""Tokens compared, at least."""
TOLERANCE = 1e-4
"""Largest difference of a logit in fp32 that is taken for rounding."""
_LENGTH, _SEED = 256, 0


@dataclass(frozen=True)
class Comparison:
    """How far two models are apart on the same random tokens."""

    tokens: int
    largest: float
    """The largest difference of any two logits."""
    agreement: float
    """Share of positions at which both find the same token most likely."""


def imported_decoder(folder: Path, model: Model) -> Decoder:
    """Danlu's model with the weights of an import, in fp32 on one device."""
    decoder = _empty_decoder(model)
    load_weights([decoder], model, folder)
    return decoder


def read_decoder(model: Model, read: Callable[[str], Tensor], stored: torch.dtype) -> Decoder:
    """Danlu's model with parameters that `read` returns by name, rounded as they were `stored`."""
    decoder = _empty_decoder(model)
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            parameter.copy_(read(name).to(stored))
    return decoder


def compare(hf: Path, model: Model, make: Callable[[], Decoder]) -> Comparison:
    """Compute the logits of random tokens with `transformers` from folder `hf` and with the decoder that `make` makes.

    One after the other, so that only one of the two is in memory. Raises ImportError where `transformers` is missing.
    """
    length = min(_LENGTH, model.sequence)
    rows = -(-TOKENS // length)
    tokens_BS = torch.randint(model.vocabulary, (rows, length), generator=torch.Generator().manual_seed(_SEED))
    expected_BSV = _hf_logits(hf, tokens_BS)
    gc.collect()
    with torch.no_grad():
        logits_BSV = make()(tokens_BS)
    largest = float((logits_BSV - expected_BSV).abs().max())
    agreement = float((logits_BSV.argmax(-1) == expected_BSV.argmax(-1)).double().mean())
    return Comparison(tokens_BS.numel(), largest, agreement)


def _hf_logits(folder: Path, tokens_BS: Tensor) -> Tensor:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True).eval()
    with torch.no_grad():
        logits: Tensor = model(tokens_BS, use_cache=False).logits
    return logits


def _empty_decoder(model: Model) -> Decoder:
    with torch.device("meta"):
        decoder = Decoder(model)
    decoder.to_empty(device="cpu")
    decoder.tie()
    for buffer in decoder.buffers():
        buffer.zero_()
    return decoder
