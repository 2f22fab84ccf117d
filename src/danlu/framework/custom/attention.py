"""Attention of documents and windows of a `transformers` model, by Danlu's operator (`model.use_kernels`).

`transformers` lets a model's attention and its mask be replaced by name. What every token sees is read from the model's
own mask function, some rows at a time: where that is one run of keys up to the token itself, the operator is told its
first key, and no mask of every pair is made. Any other mask, and none at all, goes to PyTorch's attention as ever.

Shapes: B sequences, S tokens of each, T keys, H heads, W width of a head.
"""

import sys
from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from danlu.ops.operators.masked_attention import masked_attention
from danlu.torch_compat import is_fake

NAME = "danlu"
_REPLACES = "sdpa"
"""The attention that it computes: models with caps on scores, or sinks, have another."""
_ROWS_AT_ONCE = 2**24
"""Pairs of a query and a key whose visibility is looked at together."""


def apply_attention(module: nn.Module) -> bool:
    """Let a module of `transformers` attend by Danlu's operator; whether it is one that can.

    Its configuration is copied, because other modules may share it.
    """
    modeling = sys.modules.get("transformers.modeling_utils")
    if modeling is None:  # nobody has imported it, so no module is of it
        return False
    models = [each for each in module.modules() if isinstance(each, modeling.PreTrainedModel)]
    able = all(each.config._attn_implementation == _REPLACES and each._can_set_attn_implementation() for each in models)
    if not models or not able:
        return False
    _register()
    copies: dict[int, Any] = {}
    for each in module.modules():
        for key, value in list(vars(each).items()):
            if isinstance(value, modeling.PreTrainedConfig):
                copies.setdefault(id(value), deepcopy(value))._attn_implementation = NAME
                setattr(each, key, copies[id(value)])
    return True


def _register() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, _attend)
    AttentionMaskInterface.register(NAME, _first_keys_or_mask)


def _attend(
    module: nn.Module,
    query_BHSW: Tensor,
    key_BKTW: Tensor,
    value_BKTW: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **settings: Any,
) -> tuple[Tensor, None]:
    """As `transformers` calls its attention; `attention_mask` is what `_first_keys_or_mask` made."""
    if attention_mask is None or attention_mask.ndim != 2 or dropout:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        mask = None if attention_mask is None else _as_mask(attention_mask)
        given = {"dropout": dropout, "scaling": scaling, **settings}
        attended: Tensor = sdpa_attention_forward(module, query_BHSW, key_BKTW, value_BKTW, mask, **given)[0]
        return attended, None
    q_BSHW, k_BSKW, v_BSKW = (x.transpose(1, 2) for x in (query_BHSW, key_BKTW, value_BKTW))
    width, v_width = q_BSHW.shape[-1], v_BSKW.shape[-1]
    scale = width**-0.5 if scaling is None else scaling
    widest = max(width, v_width)  # the operator wants one width: what zeros add to a value is cut off again
    q_BSHW, k_BSKW, v_BSKW = (_pad(x, widest) for x in (q_BSHW, k_BSKW, v_BSKW))
    return masked_attention(q_BSHW, k_BSKW, v_BSKW, attention_mask, scale)[..., :v_width].contiguous(), None


def _pad(x: Tensor, width: int) -> Tensor:
    return x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1]))


def _as_mask(attention_mask: Tensor) -> Tensor:
    """A mask of every pair, of first keys if these are given."""
    if attention_mask.ndim != 2:
        return attention_mask
    key_S = torch.arange(attention_mask.shape[1], device=attention_mask.device)
    return ((key_S >= attention_mask[..., None]) & (key_S <= key_S[:, None]))[:, None]


def _first_keys_or_mask(
    batch_size: int, q_length: int, kv_length: int, q_offset: int = 0, kv_offset: int = 0, **settings: Any
) -> Tensor | None:
    """As `transformers` calls what makes a mask: first keys in int32, (B, S), or its own mask, or None if causal."""
    from transformers.masking_utils import causal_mask_function, sdpa_mask

    def of_rows(first: int, rows: int, **changed: Any) -> Tensor | None:
        mask: Tensor | None = sdpa_mask(
            batch_size, rows, kv_length, q_offset + first, kv_offset, **(settings | changed)
        )
        return mask

    plain = settings.get("mask_function", causal_mask_function) is causal_mask_function
    aligned = q_length == kv_length and not q_offset and not kv_offset
    if plain or not aligned or settings.get("attention_mask") is not None or settings.get("use_vmap"):
        return of_rows(0, q_length)
    rows = max(1, _ROWS_AT_ONCE // (batch_size * kv_length))
    parts = (
        (begin, of_rows(begin, min(rows, q_length - begin), allow_is_causal_skip=False))
        for begin in range(0, q_length, rows)
    )
    first_BS = _first_keys(parts)
    return of_rows(0, q_length) if first_BS is None else first_BS


def _first_keys(parts: Iterator[tuple[int, Tensor | None]]) -> Tensor | None:
    """The first key that every query sees, from its rows of the mask; None if these are not runs up to the query."""
    found = []
    for begin, seen_B1ST in parts:
        assert seen_B1ST is not None
        seen_BST = seen_B1ST[:, 0]
        query_S1 = torch.arange(begin, begin + seen_BST.shape[1], device=seen_BST.device)[:, None]
        key_T = torch.arange(seen_BST.shape[2], device=seen_BST.device)
        first_BS = seen_BST.int().argmax(-1)
        is_run = (seen_BST == ((key_T >= first_BS[..., None]) & (key_T <= query_S1))).all()
        if not is_fake(is_run) and not is_run:  # in a dry run there are no values: it is taken for one
            return None
        found.append(first_BS)
    first_BS = torch.cat(found, 1)
    rises = (first_BS.diff(dim=1) >= 0).all()
    return first_BS.to(torch.int32) if is_fake(rises) or rises else None
