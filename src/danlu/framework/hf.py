"""Hugging Face in and out: a published model's folder into Danlu's weights, and a run's checkpoint back.

Both go one tensor at a time, so that memory does not grow with the model.
"""

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial, reduce
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from danlu.framework.hf_config import CONFIG, read_config, to_config, to_model, unknown_keys
from danlu.framework.hf_families import Family, Name, family_of, without_family
from danlu.framework.weights import STEM, parameter_shapes
from danlu.spec import toml
from danlu.spec.model import Model
from danlu.spec.problem import SpecError, problem_at
from danlu.storage.weights import SHARD_BYTES, Entry, OnProgress, Weights, write_weights

HF_STEM = "model"
MODEL = "model.toml"
ORIGINAL = "hf"
"""Folder inside an import that keeps the configuration files as they were."""

EXPORT_DTYPES = {"fp32": ("float32", torch.float32), "bf16": ("bfloat16", torch.bfloat16)}
"""Dtypes an export may be stored in, by Danlu's word: Hugging Face's word and torch's."""

_CARRIED = ("tokenizer*", "special_tokens*", "added_tokens*", "vocab*", "merges*", "chat_template*")
_KEPT = (CONFIG, "generation_config.json")

ReadTensor = Callable[[str], Tensor]


@dataclass(frozen=True)
class Imported:
    """What an import wrote."""

    model: Model
    family: Family
    unknown: list[str]
    """Keys of the configuration that were left out, because Danlu does not know them."""


@dataclass(frozen=True)
class _Place:
    """Where a parameter comes from: its table row, and its layer."""

    name: Name
    layer: str

    def hf(self, expert: int = 0) -> str:
        return self.name.hf.format(layer=self.layer, expert=expert)


def import_hf(
    folder: Path, output: Path, on_progress: OnProgress = lambda done, total: None, shard_bytes: int = SHARD_BYTES
) -> Imported:
    """Read a Hugging Face model into `output`: `model.toml`, weights under Danlu's names, the tokenizer's files."""
    config = read_config(folder / CONFIG)
    model = to_model(config, folder.resolve().name)
    source = _Source(Weights(folder, HF_STEM), model, config.family)
    source.check()
    with _finished_at_once(output) as partial_output:
        write_weights(partial_output, STEM, source.entries(), on_progress, shard_bytes)
        (partial_output / ORIGINAL).mkdir()
        for name in _KEPT:
            if (folder / name).is_file():
                shutil.copy2(folder / name, partial_output / ORIGINAL / name)
        _carry(folder, partial_output)
        (partial_output / MODEL).write_text(toml.dumps(model), "utf-8")
    return Imported(model, config.family, unknown_keys(config))


def export_hf(
    model: Model,
    read: ReadTensor,
    output: Path,
    imported: Path | None = None,
    dtype: str = "fp32",
    on_progress: OnProgress = lambda done, total: None,
    shard_bytes: int = SHARD_BYTES,
) -> Family:
    """Write a model whose parameters `read` returns by name as a Hugging Face folder.

    Of `imported`, the import that it was trained from, tokenizer and other settings are carried along.
    """
    family = family_of(model)
    if family is None:
        message = f"has {without_family(model)}, for which Llama, Mistral, Qwen2, Qwen3 and Mixtral have no place"
        raise SpecError([problem_at(output, 1, f"model {model.name}", message, "this model cannot be exported")])
    word, stored = EXPORT_DTYPES[dtype]
    with _finished_at_once(output) as partial_output:
        write_weights(partial_output, HF_STEM, _outgoing(model, family, read, stored), on_progress, shard_bytes)
        carried: dict[str, Any] = {}
        if imported is not None:
            _carry(imported, partial_output)
            for path in (imported / ORIGINAL).glob("*.json"):
                shutil.copy2(path, partial_output / path.name)
            carried = json.loads((imported / ORIGINAL / CONFIG).read_text("utf-8"))
        config = to_config(model, family, word, carried if carried.get("model_type") == family.model_type else {})
        (partial_output / CONFIG).write_text(json.dumps(config, indent=2) + "\n", "utf-8")
    return family


def _places(model: Model, family: Family) -> dict[str, _Place]:
    """For every parameter of a model its row in the family's table of names."""
    layers = [str(layer) for layer in range(model.layers)]
    known = {
        name.danlu.format(layer=layer): _Place(name, layer)
        for name in family.names
        for layer in (layers if "{layer}" in name.danlu else [""])
    }
    return {parameter: known[parameter] for parameter in parameter_shapes(model)}


def _outgoing(model: Model, family: Family, read: ReadTensor, dtype: torch.dtype) -> Iterator[Entry]:
    """The tensors of an export; experts leave their stack one by one, which is read once for all of them."""
    shapes = parameter_shapes(model)
    read_once = lru_cache(maxsize=1)(read)

    def one(name: str, expert: int | None) -> Iterator[Tensor]:
        tensor = read_once(name)
        yield tensor if expert is None else tensor[expert].T

    for name, place in _places(model, family).items():
        if not place.name.stacked:
            yield Entry(place.hf(), shapes[name], dtype, partial(one, name, None))
            continue
        experts, inputs, outputs = shapes[name]
        for expert in range(experts):
            yield Entry(place.hf(expert), (outputs, inputs), dtype, partial(one, name, expert))


class _Source:
    """The tensors of a Hugging Face folder, as those of Danlu's model."""

    def __init__(self, weights: Weights, model: Model, family: Family) -> None:
        self.weights = weights
        self.model = model
        self.shapes = parameter_shapes(model)
        self.places = _places(model, family)
        self.fused = any(name.endswith(".experts.gate_up_proj") for name in weights.names)

    def check(self) -> None:
        """Hold names and shapes against what the configuration promises."""
        expected: dict[str, tuple[int, ...]] = {}
        for name in self.places:
            expected |= self._expected(name)
        if problems := self.weights.differences(expected, self._may_be_left_out):
            raise SpecError(problems)
        self._check_tied_head()

    def entries(self) -> Iterator[Entry]:
        """What an import writes, in the model's own order."""
        for name, shape in self.shapes.items():
            dtype = reduce(torch.promote_types, map(self.weights.dtype, self._expected(name)))
            yield Entry(name, shape, dtype, partial(self._pieces, name))

    def _expected(self, name: str) -> dict[str, tuple[int, ...]]:
        """The tensors that a parameter is made of, with their shapes."""
        place, shape = self.places[name], tuple(self.shapes[name])
        if not self.model.moe or "block_sparse_moe" not in place.name.hf:
            return {place.hf(): shape}
        if not place.name.stacked:
            return {self._newer(place.hf()): shape}
        experts, inputs, outputs = shape
        if not self.fused:
            return {place.hf(expert): (outputs, inputs) for expert in range(experts)}
        if name.endswith(".down"):
            return {_stack(place, "down_proj"): (experts, outputs, inputs)}
        return {_stack(place, "gate_up_proj"): (experts, 2 * outputs, inputs)}

    def _newer(self, name: str) -> str:
        """Beside a stack of experts the router has its newer name too."""
        return name.replace(".block_sparse_moe.", ".mlp.") if self.fused else name

    def _pieces(self, name: str) -> Iterator[Tensor]:
        sources = self._expected(name)
        if not self.places[name].name.stacked:
            yield self.weights.read(next(iter(sources)))
        elif not self.fused:
            for source in sources:
                yield self.weights.read(source).T
        else:
            ((source, (experts, rows, columns)),) = sources.items()
            # Of a stack that holds gates above ups each is one half of the rows.
            first = rows // 2 if name.endswith(".up") else 0
            height = rows if name.endswith(".down") else rows // 2
            for expert in range(experts):
                yield self.weights.read(source, (expert, first, 0), (1, height, columns))[0].T

    def _may_be_left_out(self, name: str) -> bool:
        """Tensors that hold nothing of their own: old tables of rotary positions, and a head that is the embedding."""
        return name.endswith(".rotary_emb.inv_freq") or (self.model.tied and name == "lm_head.weight")

    def _check_tied_head(self) -> None:
        if not self.model.tied or "lm_head.weight" not in self.weights.names:
            return
        if not torch.equal(self.weights.read("lm_head.weight"), self.weights.read("model.embed_tokens.weight")):
            message = "differs from the embedding, but the configuration says tie_word_embeddings = true"
            hint = "tie_word_embeddings = false, if the head was meant to be its own"
            raise SpecError([problem_at(self.weights.folder, 1, "lm_head.weight", message, hint)])


def _stack(place: _Place, matrix: str) -> str:
    return f"model.layers.{place.layer}.mlp.experts.{matrix}"


def differing_fields(recipe: Model, imported: Model) -> list[str]:
    """Fields that two models must share for the one's weights to mean the same in the other."""
    free = {"name", "source", "sequence"}
    own, other = (
        {**model.model_dump(), "kv_heads": model.key_value_heads, "head_width": model.head, "mlp_width": model.mlp}
        for model in (recipe, imported)
    )
    for values in (own, other):
        values["moe"] = {key: value for key, value in (values["moe"] or {}).items() if "balance" not in key}
    return [key for key in own if key not in free and own[key] != other[key]]


def _carry(source: Path, output: Path) -> None:
    """Take the tokenizer's files along."""
    for pattern in _CARRIED:
        for path in source.glob(pattern):
            if path.is_file():
                shutil.copy2(path, output / path.name)


@contextmanager
def _finished_at_once(output: Path) -> Iterator[Path]:
    """A folder to write into that gets its name when everything is there."""
    if output.exists():
        raise SpecError([problem_at(output, 1, "output", "exists already", "another folder, or remove this one")])
    unfinished = output.with_name(output.name + ".partial")
    if unfinished.exists():
        shutil.rmtree(unfinished)
    unfinished.mkdir(parents=True)
    try:
        yield unfinished
    except BaseException:
        shutil.rmtree(unfinished)
        raise
    unfinished.rename(output)
