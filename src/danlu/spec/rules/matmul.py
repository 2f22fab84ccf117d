"""Rules of `precision.matmul`: quantized matrix products have the same blocks at every layout."""

from collections.abc import Iterator
from fnmatch import fnmatchcase
from math import lcm

from danlu.spec.divisors import closest_multiple, divisors
from danlu.spec.load import ParsedSpec
from danlu.spec.model import Model
from danlu.spec.plan import Plan
from danlu.spec.problem import Problem
from danlu.spec.recipe import LayerPrecision, PrecisionConfig, Recipe
from danlu.spec.rules.recipe import RecipeRule, precision_module_names
from danlu.spec.rules.shape import LayoutRule


def _block(precision: PrecisionConfig) -> int:
    """What shards must be a multiple of; 1 if nothing is quantized."""
    formats = {precision.matmul, *(group.matmul for group in precision.layers if group.matmul)}
    return lcm(*(precision.block_of(each) for each in formats if each != "none"))


def block_is_used(recipe: ParsedSpec[Recipe]) -> Iterator[Problem]:
    """Only quantized products have blocks."""
    precision = recipe.value.precision
    if precision.block is not None and not precision.quantizes:
        yield recipe.problem(
            "precision.block",
            f'is {precision.block}, but `matmul` is "none", so nothing is divided into blocks',
            'remove it, or set `matmul = "fp8"`',
        )


def precision_groups_set_something(recipe: ParsedSpec[Recipe]) -> Iterator[Problem]:
    """A group of layers has another dtype or format."""
    for index, group in enumerate(recipe.value.precision.layers):
        if group == LayerPrecision(match=group.match):
            yield recipe.problem(
                f"precision.layers[{index}]",
                f'sets nothing for "{group.match}"',
                'compute = "fp32" or matmul = "none", or remove it',
            )


def quantized_groups_have_matrices(recipe: ParsedSpec[Recipe]) -> Iterator[Problem]:
    """Embedding and head are never quantized."""
    names = [name for name in precision_module_names(recipe.value.decoder) if name.startswith(("blocks.", "mtp."))]
    for index, group in enumerate(recipe.value.precision.layers):
        if group.matmul in (None, "none") or any(fnmatchcase(name, group.match) for name in names):
            continue
        yield recipe.problem(
            f"precision.layers[{index}].matmul",
            f'is "{group.matmul}" for "{group.match}", but embedding and head are never quantized',
            "remove it, or match layers, such as blocks.[0-3]",
        )


def _sharded_widths(model: Model) -> dict[str, int]:
    """What tensor parallelism shards of the matrices of layers."""
    heads, mla = model.heads, model.mla
    if mla is not None:
        widths = {
            "`model.heads` × queries": heads * mla.qk_head_dim,
            "`model.heads` × keys and values": heads * (mla.qk_nope_head_dim + mla.v_head_dim),
            "`model.heads` × `model.mla.v_head_dim`": heads * mla.v_head_dim,
        }
    else:
        widths = {
            "`model.heads` × head": heads * model.head_dim,
            "`model.kv_heads` × head": model.num_kv_heads * model.head_dim,
        }
    if not model.is_moe_layer(0):
        widths["`model.mlp_width`"] = model.mlp_dim
    if model.moe and model.moe.shared:
        widths["`model.moe.shared` × `model.moe.width`"] = model.moe.shared * model.moe.width
    return widths


def shards_are_whole_blocks(recipe: ParsedSpec[Recipe], plan: ParsedSpec[Plan]) -> Iterator[Problem]:
    """A block has one scale: shards of a matrix that end inside of one would have others than the whole matrix."""
    tp, block = plan.value.degrees.tp, _block(recipe.value.precision)
    if tp == 1 or block == 1:
        return
    widths = _sharded_widths(recipe.value.decoder)
    wrong = [f"{name} ({width})" for name, width in widths.items() if width % tp == 0 and width // tp % block]
    if wrong:
        valid = [each for each in divisors(tp) if not any(width % (each * block) for width in widths.values())]
        yield plan.problem(
            "degrees.tp",
            f"is {tp}, which divides {' and '.join(wrong)} into pieces that are no multiples of {block}, the block of "
            "`precision.matmul`",
            f"tp = {max(valid, default=1)}, or `block` under [precision]",
        )


def sequence_shards_are_whole_blocks(recipe: ParsedSpec[Recipe], plan: ParsedSpec[Plan]) -> Iterator[Problem]:
    """Gradients of weights are sums over blocks of consecutive tokens."""
    degrees, length, block = plan.value.degrees, recipe.value.batch.length, _block(recipe.value.precision)
    latent = recipe.value.decoder.mla is not None  # its first matrices multiply positions that `tp` shards
    pieces, axes = (degrees.cp * degrees.tp, "`cp` × `tp`") if latent else (degrees.cp, "`degrees.cp`")
    if degrees.cp > 1 and plan.value.context_parallel == "ring":
        pieces, axes = 2 * pieces, f"a ring of {axes}"  # of two chunks a rank
    if pieces > 1 and length % pieces == 0 and length // pieces % block:
        yield recipe.problem(
            "batch.length",
            f"is {length}, which {axes} ({pieces}) divides into pieces of {length // pieces}, no multiple of {block}, "
            "the block of `precision.matmul`",
            f"length = {closest_multiple(length, pieces * block)}, or a smaller degree",
        )


def quantized_inputs_are_kept(recipe: ParsedSpec[Recipe], plan: ParsedSpec[Plan]) -> Iterator[Problem]:
    """Quantized products keep their gathered inputs in one byte an element; gathering again is not written for them."""
    if plan.value.regather_inputs and recipe.value.precision.quantizes:
        yield plan.problem(
            "regather_inputs",
            f'is true, but `precision.matmul` is "{recipe.value.precision.matmul}": quantized inputs are kept, in one '
            "byte an element, and not gathered again",
            "regather_inputs = false",
        )


def quantized_products_are_not_compiled(recipe: ParsedSpec[Recipe], plan: ParsedSpec[Plan]) -> Iterator[Problem]:
    """Compiled blocks with quantized products have not been compared with others yet."""
    if plan.value.compile and recipe.value.precision.quantizes:
        yield plan.problem(
            "compile",
            "is true, but the recipe quantizes matrix products, and compiled blocks are not verified with them",
            'compile = false, or `matmul = "none"` under [precision]',
        )


MATMUL_RULES: tuple[RecipeRule, ...] = (block_is_used, precision_groups_set_something)
DECODER_MATMUL_RULES: tuple[RecipeRule, ...] = (quantized_groups_have_matrices,)
MATMUL_LAYOUT_RULES: tuple[LayoutRule, ...] = (quantized_inputs_are_kept, quantized_products_are_not_compiled)
DECODER_MATMUL_LAYOUT_RULES: tuple[LayoutRule, ...] = (shards_are_whole_blocks, sequence_shards_are_whole_blocks)
