"""Rules between the shape of a model and the degrees that divide it."""

from collections.abc import Callable, Iterator
from math import gcd, lcm

from danlu.spec.divisors import closest_divisor, closest_multiple
from danlu.spec.load import ParsedSpec
from danlu.spec.model import Model
from danlu.spec.plan import Plan
from danlu.spec.problem import Problem
from danlu.spec.recipe import Recipe

LayoutRule = Callable[[ParsedSpec[Recipe], ParsedSpec[Plan]], Iterator[Problem]]


def _tensor_widths(model: Model) -> dict[str, int]:
    """What tensor parallelism shards beside the vocabulary: heads, and feed-forward networks that all tokens use."""
    widths = {"model.kv_heads" if model.kv_heads else "model.heads": model.num_kv_heads}
    if not model.is_moe_layer(0):
        widths["model.mlp_width"] = model.mlp_dim
    if model.moe and model.moe.shared and model.is_moe_layer(model.layers - 1):
        widths["model.moe.shared × model.moe.width"] = model.moe.shared * model.moe.width
    return widths


def widths_divide(recipe: ParsedSpec[Recipe], plan: ParsedSpec[Plan]) -> Iterator[Problem]:
    """Heads and feed-forward widths divide over `tp`; routed experts are not sharded."""
    tp, widths = plan.value.degrees.tp, _tensor_widths(recipe.value.decoder)
    wrong = [f"`{name}` ({width})" for name, width in widths.items() if width % tp]
    if wrong:
        valid = closest_divisor(tp, gcd(*widths.values()))
        yield plan.problem("degrees.tp", f"is {tp}, but must divide {' and '.join(wrong)}", f"tp = {valid}")


def vocabulary_divides(recipe: ParsedSpec[Recipe], plan: ParsedSpec[Plan]) -> Iterator[Problem]:
    """The embedding and the head are sharded by rows of the vocabulary."""
    tp, vocabulary = plan.value.degrees.tp, recipe.value.decoder.vocabulary
    if vocabulary % tp:
        padded = -(-vocabulary // tp) * tp  # never fewer: the tokenizer's last tokens would have no row
        yield recipe.problem(
            "model.vocabulary",
            f"is {vocabulary}, but must be a multiple of `degrees.tp` ({tp})",
            f"vocabulary = {padded}; the rows added are never looked up",
        )


def length_divides(recipe: ParsedSpec[Recipe], plan: ParsedSpec[Plan]) -> Iterator[Problem]:
    """`cp` shards a sequence, in a ring into two chunks a rank, and sequence parallelism further over `tp`."""
    degrees, length = plan.value.degrees, recipe.value.batch.length
    parts = degrees.cp * degrees.tp
    if degrees.cp > 1 and plan.value.context_parallel == "ring" and length % (chunks := lcm(parts, 2 * degrees.cp)):
        yield recipe.problem(
            "batch.length",
            f"is {length}, but must be a multiple of {chunks}, as `context_parallel` is ring: of 2 × `cp` "
            f"(2 × {degrees.cp}) and of `cp` × `tp` ({degrees.cp} × {degrees.tp})",
            f"length = {closest_multiple(length, chunks)}",
        )
    elif length % parts:
        yield recipe.problem(
            "batch.length",
            f"is {length}, but must be a multiple of `cp` × `tp` ({degrees.cp} × {degrees.tp} = {parts})",
            f"length = {closest_multiple(length, parts)}",
        )


def _exchangeable(heads: int, kv_heads: int, cp: int) -> bool:
    """Whether `cp` ranks can exchange heads for positions; too few key-value heads are repeated."""
    return heads % cp == 0 and (kv_heads % cp == 0 or cp % kv_heads == 0)


def cp_divides_heads(recipe: ParsedSpec[Recipe], plan: ParsedSpec[Plan]) -> Iterator[Problem]:
    """Ulysses exchanges heads for positions; a ring takes any number of heads."""
    model, cp, tp = recipe.value.decoder, plan.value.degrees.cp, plan.value.degrees.tp
    if model.num_kv_heads % tp or plan.value.context_parallel == "ring":
        return  # the first is reported by `widths_divide`
    heads, kv_heads = model.heads // tp, model.num_kv_heads // tp
    if not _exchangeable(heads, kv_heads, cp):
        valid = closest_divisor(cp, heads, also=lambda ranks: _exchangeable(heads, kv_heads, ranks))
        yield plan.problem(
            "degrees.cp",
            f"is {cp}, but must divide the {heads} heads of a rank, and divide or be a multiple of its {kv_heads} "
            f"key-value heads (`heads` / `tp` and `kv_heads` / `tp`)",
            f'cp = {valid}, or context_parallel = "ring", which exchanges no heads',
        )


def a_ring_attends_plainly(recipe: ParsedSpec[Recipe], plan: ParsedSpec[Plan]) -> Iterator[Problem]:
    """A ring merges blocks of plain causal attention, or of documents; other kinds need full sequences."""
    model, length = recipe.value.decoder, recipe.value.batch.length
    if plan.value.context_parallel != "ring" or plan.value.degrees.cp == 1:
        return
    others = {
        "[model.mla]": model.mla is not None,
        "`model.window`": model.window is not None and model.window < length,
        "`model.sinks`": model.sinks,
        "`model.score_softcap`": model.score_softcap is not None,
        "`model.query_scalar`": model.query_scalar is not None,
    }
    if found := [name for name, has in others.items() if has]:
        yield plan.problem(
            "context_parallel",
            f"is ring, which computes plain causal attention, but the model has {' and '.join(found)}",
            'context_parallel = "ulysses", or cp = 1',
        )


def experts_exist(recipe: ParsedSpec[Recipe], plan: ParsedSpec[Plan]) -> Iterator[Problem]:
    """Expert parallelism needs experts."""
    ep = plan.value.degrees.ep
    if ep > 1 and not _has_experts(recipe.value.decoder):
        yield plan.problem(
            "degrees.ep",
            f'is {ep}, but the model "{recipe.value.decoder.name}" has no expert layers',
            "ep = 1, or give the model a table [model.moe]",
        )


def experts_divide(recipe: ParsedSpec[Recipe], plan: ParsedSpec[Plan]) -> Iterator[Problem]:
    """Every rank of `ep` holds the same number of experts, and `ep` folds the ranks of `shard` × `cp` × `tp`."""
    degrees, model = plan.value.degrees, recipe.value.decoder
    if model.moe is None or not _has_experts(model):
        return
    ranks = degrees.shard * degrees.cp * degrees.tp
    wrong = [f"`model.moe.experts` ({model.moe.experts})"] if model.moe.experts % degrees.ep else []
    if ranks % degrees.ep:
        wrong.append(f"`shard` × `cp` × `tp` ({degrees.shard} × {degrees.cp} × {degrees.tp} = {ranks})")
    if wrong:
        valid = closest_divisor(degrees.ep, gcd(model.moe.experts, ranks))
        yield plan.problem("degrees.ep", f"is {degrees.ep}, but must divide {' and '.join(wrong)}", f"ep = {valid}")


def _has_experts(model: Model) -> bool:
    return model.is_moe_layer(model.layers - 1)


SHAPE_RULES: tuple[LayoutRule, ...] = (
    widths_divide,
    vocabulary_divides,
    length_divides,
    cp_divides_heads,
    a_ring_attends_plainly,
    experts_exist,
    experts_divide,
)
