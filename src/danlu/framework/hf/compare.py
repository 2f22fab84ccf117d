"""Compares the logits of `transformers` and of Danlu's decoder for the same tokens, to verify an import or export."""

import gc
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from danlu.framework.decoder.decoder import Decoder
from danlu.framework.full_model import empty_decoder
from danlu.framework.hf.convert import weight_shapes
from danlu.framework.hf.families import find_family
from danlu.framework.weights import buffer_shapes, load_weights
from danlu.spec.model import Model

MIN_TOKENS = 512
"""Tokens compared, at least."""
LOGIT_TOLERANCE = 1e-4
"""Largest difference of a logit in fp32 that counts as rounding."""
_LENGTH, _SEED = 256, 0


@dataclass(frozen=True)
class LogitComparison:
    """How much two models differ on the same random tokens."""

    tokens: int
    max_difference: float
    """The largest difference of any two logits."""
    top1_agreement: float
    """Share of positions at which both find the same token most likely."""


def load_imported_decoder(folder: Path, model: Model) -> Decoder:
    """Danlu's decoder with the weights of an import, in fp32 on one device."""
    decoder = empty_decoder(model)
    load_weights([decoder], model, folder)
    return decoder


def load_decoder(model: Model, read: Callable[[str], Tensor], stored: torch.dtype) -> Decoder:
    """Danlu's decoder with what `read` returns by name, parameters rounded to the `stored` dtype."""
    decoder = empty_decoder(model)
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            parameter.copy_(read(name).to(stored))
        family = find_family(model)
        for name in buffer_shapes(model).keys() & (weight_shapes(model, family) if family else {}).keys():
            decoder.get_buffer(name).copy_(read(name))
    return decoder


def compare_logits(hf: Path, model: Model, make: Callable[[], Decoder]) -> LogitComparison:
    """Compute the logits of random tokens with `transformers` from folder `hf` and with the decoder from `make`.

    One after the other, so that only one of the two is in memory. Raises ImportError where `transformers` is missing.
    """
    length = min(_LENGTH, model.sequence)
    rows = -(-MIN_TOKENS // length)
    tokens_BS = torch.randint(model.vocabulary, (rows, length), generator=torch.Generator().manual_seed(_SEED))
    expected_BSV = _hf_logits(hf, tokens_BS)
    gc.collect()
    with torch.no_grad():
        logits_BSV = make()(tokens_BS)
    largest = float((logits_BSV - expected_BSV).abs().max())
    agreement = float((logits_BSV.argmax(-1) == expected_BSV.argmax(-1)).double().mean())
    return LogitComparison(tokens_BS.numel(), largest, agreement)


def _hf_logits(folder: Path, tokens_BS: Tensor) -> Tensor:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True).eval()
    with torch.no_grad():
        logits: Tensor = model(tokens_BS, use_cache=False).logits
    return logits
