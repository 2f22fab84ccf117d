"""Import a Hugging Face model's folder into Danlu's weights, and export a run's checkpoint.

Both work one tensor at a time, so that memory does not grow with the model.
"""

import json
import math
import re
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial, reduce
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor

from danlu.framework.hf.config import (
    CONFIG_FILE,
    config_from_model,
    model_from_config,
    read_config,
    unknown_keys,
)
from danlu.framework.hf.families import ModelFamily, find_family, unsupported_trait
from danlu.framework.hf.families.hf_config import HFConfig
from danlu.framework.hf.families.tensor_names import BLOCK, TensorNamePair
from danlu.framework.hf.tokenizer import GENERATION_FILE, ExportTokenizer
from danlu.framework.weights import WEIGHTS_FILE_PREFIX, buffer_shapes, parameter_shapes
from danlu.spec import toml
from danlu.spec.byte_format import format_bytes
from danlu.spec.model import Model, Mtp
from danlu.spec.problem import SpecError, problem_at
from danlu.storage.checkpoint.safetensors_io import (
    SHARD_BYTES,
    OnProgress,
    SafetensorsReader,
    WeightEntry,
    write_safetensors,
)

HF_FILE_PREFIX = "model"
MODEL_FILE = "model.toml"
HF_CONFIG_DIR = "hf"
"""Folder inside an import with the original configuration files."""

EXPORT_DTYPES = {"fp32": ("float32", torch.float32), "bf16": ("bfloat16", torch.bfloat16)}
"""Dtypes of an export, by Danlu's name: Hugging Face's name and torch's dtype."""

_TOKENIZER_FILES = ("tokenizer*", "special_tokens*", "added_tokens*", "vocab*", "merges*", "chat_template*")
_LAYER_NUMBER = re.compile(r"\.\d+\.")
_MODULE_LAYER = re.compile(r"^mtp\.\d+\.block\b")
_CONFIG_FILES = (CONFIG_FILE, GENERATION_FILE)

ReadTensor = Callable[[str], Tensor]


@dataclass(frozen=True)
class ImportResult:
    """What an import wrote."""

    model: Model
    family: ModelFamily
    ignored_keys: list[str]
    """Keys of the configuration that were skipped, because Danlu does not know them."""
    left_out: str
    """What of the weights was not imported, because Danlu's model does not have it; empty if nothing."""


@dataclass(frozen=True)
class _TensorMapping:
    """The Hugging Face tensors of a parameter: its row in the table of names, and its layer."""

    name: TensorNamePair
    layer: str

    def hf(self, expert: int = 0) -> str:
        return self.name.hf.format(layer=self.layer, expert=expert)

    @property
    def stack(self) -> str:
        return self.name.stack.format(layer=self.layer)


def import_hf(
    folder: Path,
    output: Path,
    on_progress: OnProgress = lambda done, total: None,
    shard_bytes: int = SHARD_BYTES,
    mtp: bool = False,
) -> ImportResult:
    """Import a Hugging Face model into `output`: `model.toml`, weights under Danlu's names, the tokenizer's files.

    With `mtp` also its modules of multi-token prediction.
    """
    config, model, source = open_hf(folder, mtp)
    with _atomic_output_dir(output) as partial_output:
        write_safetensors(partial_output, WEIGHTS_FILE_PREFIX, source.entries(), on_progress, shard_bytes)
        (partial_output / HF_CONFIG_DIR).mkdir()
        for name in _CONFIG_FILES:
            if (folder / name).is_file():
                shutil.copy2(folder / name, partial_output / HF_CONFIG_DIR / name)
        _copy_tokenizer_files(folder, partial_output)
        (partial_output / MODEL_FILE).write_text(toml.dumps(model), "utf-8")
    return ImportResult(model, source.family, unknown_keys(config, source.family), source.left_out())


def open_hf(folder: Path, mtp: bool = False) -> tuple[HFConfig, Model, "HFWeights"]:
    """A Hugging Face folder whose configuration Danlu supports, and whose tensors are those of the configuration.

    With `mtp` the model has the modules of multi-token prediction that its configuration says.
    """
    config, family = read_config(folder / CONFIG_FILE)
    model = model_from_config(config, family, folder.resolve().name)
    if mtp:
        model = model.model_copy(update={"mtp": _configured_mtp(config, family)})
    weights = SafetensorsReader(folder, HF_FILE_PREFIX)
    _check_layers(config, family, model, weights)
    source = HFWeights(weights, model, family)
    source.check()
    return config, model, source


def export_hf(
    model: Model,
    read: ReadTensor,
    output: Path,
    imported: Path | None = None,
    dtype: str = "fp32",
    on_progress: OnProgress = lambda done, total: None,
    tokenizer: ExportTokenizer | None = None,
    on_warning: Callable[[str], None] = warnings.warn,
) -> ModelFamily:
    """Write a model whose parameters `read` returns by name as a Hugging Face folder.

    Settings come from `imported`, the import that it was trained from; so does the tokenizer, unless the run was
    trained with another one: `tokenizer`. `on_warning` is told which tensors no family has.
    """
    family = find_family(model)
    if model.mtp and family and not family.mtp_names:
        on_warning(_left_out(model, family, EXPORT_DTYPES[dtype][1]))
        model = model.model_copy(update={"mtp": None})
    if family is None:
        message = f"has {unsupported_trait(model)}"
        raise SpecError([problem_at(output, 1, f"model {model.name}", message, "this model cannot be exported")])
    word, stored = EXPORT_DTYPES[dtype]
    with _atomic_output_dir(output) as partial_output:
        write_safetensors(partial_output, HF_FILE_PREFIX, _export_entries(model, family, read, stored), on_progress)
        carried: dict[str, Any] = {}
        if imported is not None:
            _copy_tokenizer_files(imported, partial_output)
            for path in (imported / HF_CONFIG_DIR).glob("*.json"):
                shutil.copy2(path, partial_output / path.name)
            carried = json.loads((imported / HF_CONFIG_DIR / CONFIG_FILE).read_text("utf-8"))
        config = config_from_model(
            model, family, word, carried if carried.get("model_type") == family.model_type else {}
        )
        if tokenizer is not None and not tokenizer.is_in(partial_output):
            for path in _tokenizer_files(partial_output):
                path.unlink()
            tokenizer.write(partial_output, model.sequence)
            tokenizer.write_generation(partial_output)
            config |= tokenizer.special_tokens
        (partial_output / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n", "utf-8")
    return family


def _left_out(model: Model, family: ModelFamily, dtype: torch.dtype) -> str:
    """What an export leaves out of a model with multi-token prediction."""
    shapes = {name: shape for name, shape in parameter_shapes(model).items() if name.startswith("mtp.")}
    size = format_bytes(sum(shape.numel() for shape in shapes.values()) * dtype.itemsize)
    return (
        f"the modules of multi-token prediction are not exported, because {family.title} has none: {len(shapes)} "
        f"tensors, {size}, from {next(iter(shapes))} on; the main model does not need them, and the run's checkpoint "
        "keeps them"
    )


def _configured_mtp(config: HFConfig, family: ModelFamily) -> Mtp:
    """The modules of multi-token prediction of a configuration."""
    key = "num_nextn_predict_layers"
    if not family.mtp_names:
        message, hint = f"is {family.model_type}, which has no modules of multi-token prediction", "leave --mtp out"
        raise SpecError([config.problem("model_type", message, hint)])
    try:
        return Mtp(depth=config.get(key))
    except ValidationError:
        message = f"is {config.get(key)!r}, so there is no module of multi-token prediction to import"
        raise SpecError([config.problem(key, message, "leave --mtp out")]) from None


def _check_layers(config: HFConfig, family: ModelFamily, model: Model, weights: SafetensorsReader) -> None:
    """Compare the number of layers with the number of tensors, before as many layers are made."""
    if len(weights.names) < model.layers:
        message = f"is {model.layers}, but there are only {len(weights.names)} tensors"
        hint = "use configuration and weights of one model"
        raise SpecError([config.problem("num_hidden_layers", message, hint)])
    experts = model.moe.experts if model.moe else 0
    if experts and not _has_stacks(weights) and len(weights.names) < experts:
        message = f"is {experts}, but there are only {len(weights.names)} tensors"
        raise SpecError([config.problem(family.experts_key, message, "use configuration and weights of one model")])


def weight_shapes(model: Model, family: ModelFamily) -> dict[str, torch.Size]:
    """Names and shapes of a model's parameters, and of the buffers that the family has a tensor for."""
    theirs = {name.danlu for name in family.names}
    buffers = {
        name: shape
        for name, shape in buffer_shapes(model).items()
        if _LAYER_NUMBER.sub(".{layer}.", _MODULE_LAYER.sub("blocks.0", name), 1) in theirs
    }
    return parameter_shapes(model) | buffers


def _tensor_mappings(model: Model, family: ModelFamily) -> dict[str, _TensorMapping]:
    """The Hugging Face tensors of every parameter of a model, and of its buffers if they have one."""
    layers = [str(layer) for layer in range(model.layers)]
    known = {
        name.danlu.format(layer=layer): _TensorMapping(name, layer)
        for name in family.names
        for layer in (layers if "{layer}" in name.danlu else [""])
    }
    for module in range(model.mtp_depth if family.mtp_names else 0):
        layer = str(model.layers + module)
        inner = [name for name in family.names if name.danlu.startswith(f"{BLOCK}.")]
        known |= {name.danlu.replace(BLOCK, f"mtp.{module}.block"): _TensorMapping(name, layer) for name in inner}
        known |= {
            name.danlu.format(module=module): _TensorMapping(name, layer)
            for name in family.mtp_names
            if name.danlu.startswith("mtp.")
        }
    return {parameter: known[parameter] for parameter in weight_shapes(model, family)}


def _export_entries(model: Model, family: ModelFamily, read: ReadTensor, dtype: torch.dtype) -> Iterator[WeightEntry]:
    """The tensors of an export; experts are written one by one from their stack, which is read once."""
    shapes, buffers = weight_shapes(model, family), buffer_shapes(model)
    read_once = lru_cache(maxsize=1)(read)

    def one(name: str, expert: int | None) -> Iterator[Tensor]:
        tensor = read_once(name)
        yield tensor if expert is None else tensor[expert].T

    def woven(first: str, second: str) -> Iterator[Tensor]:
        for rows in zip(read(first), read(second), strict=True):
            yield torch.stack(rows, dim=-1).flatten(-2)

    mappings = _tensor_mappings(model, family)
    pairs: dict[str, list[str]] = {}
    for name, mapping in mappings.items():
        pairs.setdefault(mapping.hf(), []).append(name)
    for name, mapping in mappings.items():
        if mapping.name.woven is not None:
            if mapping.name.woven == 0:
                first, second = pairs[mapping.hf()]
                yield WeightEntry(mapping.hf(), _woven_shape(shapes[name]), dtype, partial(woven, first, second))
            continue
        if not mapping.name.per_expert:
            stored = torch.float32 if name in buffers else dtype
            yield WeightEntry(mapping.hf(), shapes[name], stored, partial(one, name, None))
            continue
        experts, inputs, outputs = shapes[name]
        for expert in range(experts):
            yield WeightEntry(mapping.hf(expert), (outputs, inputs), dtype, partial(one, name, expert))
    for copy, table in _table_copies(model, family).items():
        yield WeightEntry(copy, shapes[table], dtype, partial(one, table, None))


def _table_copies(model: Model, family: ModelFamily) -> dict[str, str]:
    """Hugging Face's copies of the tables that modules of multi-token prediction share with the model: whose copy."""
    return {
        _TensorMapping(pair, str(model.layers + module)).hf(): "embed.token.weight" if model.tied else pair.danlu
        for module in range(model.mtp_depth)
        for pair in family.mtp_names
        if not pair.danlu.startswith("mtp.")
    }


class HFWeights:
    """The tensors of a Hugging Face folder as parameters of Danlu's model."""

    def __init__(self, weights: SafetensorsReader, model: Model, family: ModelFamily) -> None:
        self.weights = weights
        self.model = model
        self.family = family
        self.shapes = weight_shapes(model, family)
        self.mappings = _tensor_mappings(model, family)
        self.table_copies = _table_copies(model, family)
        self.stacked = _has_stacks(weights)

    def check(self) -> None:
        """Compare names and shapes with the configuration."""
        expected: dict[str, tuple[int, ...]] = {}
        for name in self.mappings:
            expected |= self._expected(name)
        if problems := self.weights.find_mismatches(expected, self._is_redundant):
            raise SpecError(problems)
        self._check_tied_head()
        self._check_table_copies()

    def left_out(self) -> str:
        """What of the weights Danlu's model does not have, with its size; empty if nothing."""
        names = [name for name in self.weights.names if self.family.is_left_out(name, self.model)]
        if not names:
            return ""
        size = sum(math.prod(self.weights.shape(name)) * self.weights.dtype(name).itemsize for name in names)
        return f"{self.family.left_out_title}: {len(names)} tensors, {format_bytes(size)}"

    def parameter_dtypes(self) -> set[torch.dtype]:
        """Dtypes of all tensors but buffers, which keep theirs in any export."""
        buffers = {self.mappings[name].hf() for name in buffer_shapes(self.model) if name in self.mappings}
        return {self.weights.dtype(name) for name in self.weights.names if name not in buffers}

    def entries(self) -> Iterator[WeightEntry]:
        """What an import writes, in the model's order."""
        for name, shape in self.shapes.items():
            dtype = reduce(torch.promote_types, map(self.weights.dtype, self._expected(name)))
            yield WeightEntry(name, shape, dtype, partial(self._pieces, name))

    def _expected(self, name: str) -> dict[str, tuple[int, ...]]:
        """The tensors that make up a parameter, with their shapes."""
        mapping, shape = self.mappings[name], tuple(self.shapes[name])
        if mapping.name.woven is not None:
            return {mapping.hf(): _woven_shape(shape)}
        stack = mapping.stack if self.stacked else ""
        if not mapping.name.per_expert:
            return {stack or mapping.hf(): shape}
        experts, inputs, outputs = shape
        if not stack:
            return {mapping.hf(expert): (outputs, inputs) for expert in range(experts)}
        return {stack: (experts, outputs if name.endswith(".down") else 2 * outputs, inputs)}

    def _pieces(self, name: str) -> Iterator[Tensor]:
        sources = self._expected(name)
        woven = self.mappings[name].name.woven
        if woven is not None:
            ((source, (experts, *rest)),) = sources.items()
            for expert in range(experts):
                piece = self.weights.read(source, (expert, *(0 for _ in rest)), (1, *rest))[0]
                yield piece[..., woven::2]
        elif not self.mappings[name].name.per_expert:
            yield self.weights.read(next(iter(sources)))
        elif not self.stacked:
            for source in sources:
                yield self.weights.read(source).T
        else:
            ((source, (experts, rows, columns)),) = sources.items()
            # In a stack of gate above up, each is one half of the rows.
            first = rows // 2 if name.endswith(".up") else 0
            height = rows if name.endswith(".down") else rows // 2
            for expert in range(experts):
                yield self.weights.read(source, (expert, first, 0), (1, height, columns))[0].T

    def _is_redundant(self, name: str) -> bool:
        """Tensors that need not be imported: the family's, a head tied to the embedding, copies of tables."""
        tied = self.model.tied and name == "lm_head.weight"
        return self.family.is_redundant(name, self.model) or tied or name in self.table_copies

    def _check_tied_head(self) -> None:
        if not self.model.tied or "lm_head.weight" not in self.weights.names:
            return
        if not torch.equal(self.weights.read("lm_head.weight"), self.weights.read("model.embed_tokens.weight")):
            message = "differs from the embedding, but the configuration says tie_word_embeddings = true"
            hint = "tie_word_embeddings = false, if the head is a separate matrix"
            raise SpecError([problem_at(self.weights.folder, 1, "lm_head.weight", message, hint)])

    def _check_table_copies(self) -> None:
        for copy, table in self.table_copies.items():
            theirs = self.mappings[table].hf()
            if copy in self.weights.names and not torch.equal(self.weights.read(copy), self.weights.read(theirs)):
                message = f"differs from {theirs}, but Danlu's modules of multi-token prediction share this table"
                hint = "leave --mtp out: the main model does not need them"
                raise SpecError([problem_at(self.weights.folder, 1, copy, message, hint)])


def _woven_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (*shape[:-1], 2 * shape[-1])


def _has_stacks(weights: SafetensorsReader) -> bool:
    """Whether experts are stacked: gate above up in one tensor, down in another."""
    return any(name.endswith(".experts.gate_up_proj") for name in weights.names)


def differing_fields(recipe: Model, imported: Model) -> list[str]:
    """Fields that differ and change the meaning of the weights."""
    free = {"name", "source", "sequence"}
    own, other = (
        {**model.model_dump(), "kv_heads": model.num_kv_heads, "head_width": model.head_dim, "mlp_width": model.mlp_dim}
        for model in (recipe, imported)
    )
    for values in (own, other):
        values["moe"] = {key: value for key, value in (values["moe"] or {}).items() if "balance" not in key}
    return [key for key in own if key not in free and own[key] != other[key]]


def _tokenizer_files(folder: Path) -> list[Path]:
    return [path for pattern in _TOKENIZER_FILES for path in folder.glob(pattern) if path.is_file()]


def _copy_tokenizer_files(source: Path, output: Path) -> None:
    """Copy the tokenizer's files."""
    for path in _tokenizer_files(source):
        shutil.copy2(path, output / path.name)


@contextmanager
def _atomic_output_dir(output: Path) -> Iterator[Path]:
    """A folder to write into that is renamed to `output` when it is complete."""
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
