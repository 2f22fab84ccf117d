"""Documents in the sequences of a custom model: whether its forward can keep them apart, and whether it does."""

import inspect

import torch
from torch import Tensor, nn

from danlu.framework.custom.construct import CustomModelError
from danlu.framework.custom.forward_trace import get_logits
from danlu.framework.custom.verify_tp import TP_TOLERANCE
from danlu.spec.plan import Plan

POSITIONS = "position_ids"
"""The argument of a module's forward that has each token's position in its document, as transformers calls it."""
PACKED_ATTENTION = ("sdpa", "eager", "flex_attention")
"""Implementations of transformers that make a mask of restarting positions; others do so for batches of one row."""
_KEY = "data.document_mask"
_ALTERNATIVE = "`document_mask = false`, or describe the model by its shape"


def check_document_support(module: nn.Module) -> None:
    """Raise `CustomModelError` if the module's forward cannot be told where documents begin."""
    if POSITIONS not in inspect.signature(type(module).forward).parameters:
        raise CustomModelError(
            _KEY,
            f"is true, but the forward of {type(module).__name__} takes no `{POSITIONS}`: they restart with a document",
            f"let it take them, mask attention by them, and give its layers positions from them; {_ALTERNATIVE}",
        )
    attention = _attention_of(module)
    if attention is not None and attention not in PACKED_ATTENTION:
        raise CustomModelError(
            _KEY,
            f'is true, but {type(module).__name__} has the attention "{attention}", which would see other documents',
            f'one of {", ".join(PACKED_ATTENTION)} (attn_implementation="sdpa"); {_ALTERNATIVE}',
        )


def check_block_comparison(plan: Plan) -> None:
    """Raise `CustomModelError` if a rank would compare a compiled block alone, in which others wait for its experts."""
    if plan.compile and plan.check_compiled and plan.degrees.ep > 1:
        raise CustomModelError(
            _KEY,
            "is true, and with `compile` a kind of block is compared with eager code when it is first called, which "
            f"`ep` = {plan.degrees.ep} ranks must do together: some may have sequences of one document and no mask",
            f"`check_compiled = false` in the plan; {_ALTERNATIVE}",
        )


def verify_documents(module: nn.Module, vocabulary: int) -> None:
    """Run two rows of documents, and every document alone; logits that differ raise `CustomModelError`."""
    module.eval()
    tokens = torch.arange(24).view(2, 12) * 7919 % vocabulary
    lengths = ((5, 7), (1, 3, 8))
    positions = torch.stack([torch.cat([torch.arange(length) for length in row]) for row in lengths])
    with torch.no_grad():
        logits = get_logits(module(tokens, **{POSITIONS: positions}))
        alone = [
            torch.cat([get_logits(module(part[None]))[0] for part in row.split(parts)])
            for row, parts in zip(tokens, map(list, lengths), strict=True)
        ]
    module.train()
    expected = torch.stack(alone)
    deviation = float((logits - expected).abs().max() / expected.abs().max())
    if not deviation <= TP_TOLERANCE[logits.dtype]:
        raise CustomModelError(
            _KEY,
            f"is true, but with `{POSITIONS}` that restart, {type(module).__name__} gives a document other logits than "
            f"alone, by {deviation:.1%} of the largest",
            f"attention must not cross from one document to the next: mask it by `{POSITIONS}`; {_ALTERNATIVE}",
        )


def is_verified_by_name(module: nn.Module) -> bool:
    """Whether the module's attention is one of transformers that is known to keep documents apart."""
    return _attention_of(module) in PACKED_ATTENTION


def _attention_of(module: nn.Module) -> str | None:
    """The implementation of attention that a transformers model was built with."""
    return getattr(getattr(module, "config", None), "_attn_implementation", None)


def packed_inputs(positions: Tensor | None) -> dict[str, Tensor]:
    """What a module's forward takes besides tokens."""
    return {} if positions is None else {POSITIONS: positions}
