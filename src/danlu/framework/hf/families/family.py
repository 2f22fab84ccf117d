"""What a Hugging Face family says of itself: tensors, keys of `config.json`, and which models it has."""

from collections.abc import Collection, Mapping
from typing import Any, ClassVar

from danlu.framework.hf.families.hf_config import HFConfig
from danlu.framework.hf.families.keys import COMMON_DEFAULTS, COMMON_KINDS, ONLY_VALUES, REQUIRED_KEYS, KeyKind
from danlu.framework.hf.families.rope import rope_fields, rope_values
from danlu.framework.hf.families.tensor_names import ATTENTION, DENSE, ENDS, TensorNamePair
from danlu.framework.hf.families.traits import model_traits
from danlu.framework.hf.families.windows import SLIDING, is_layer_count, listed_kinds, window_fields
from danlu.spec.model import Model


class ModelFamily:
    """One `model_type` as most families are; a family of its own kind overrides what is different."""

    model_type: ClassVar[str]
    architecture: ClassVar[str]
    title: ClassVar[str]
    """Its name in a sentence."""
    names: ClassVar[tuple[TensorNamePair, ...]] = (*ENDS, *ATTENTION, *DENSE)
    """May have more tensors than a model has parameters, but all that it can have."""
    required_keys: ClassVar[Mapping[str, str]] = REQUIRED_KEYS
    defaults: ClassVar[Mapping[str, Any]] = COMMON_DEFAULTS
    kinds: ClassVar[Mapping[str, KeyKind]] = COMMON_KINDS
    only_values: ClassVar[Mapping[str, Any]] = ONLY_VALUES
    experts_key: ClassVar[str] = ""
    """The key for the number of experts, if it has any."""
    left_out_title: ClassVar[str] = ""
    """Of tensors that an import leaves out, what they are."""
    traits: ClassVar[Collection[str]] = ()
    """Names of `model_traits` that all its models have."""
    optional_traits: ClassVar[Collection[str]] = ()
    """Those that some of its models have."""

    def model_fields(self, config: HFConfig) -> dict[str, Any]:
        """The fields of a `Model` that a configuration describes; what is not supported is added to its problems."""
        fields = {field: config.get(key) for key, field in self.required_keys.items()}
        fields |= self.bias_fields(config) | self.rope_fields(config) | self.window_fields(config)
        fields |= {"kv_heads": config.get("num_key_value_heads") or fields["heads"]}
        width = config.get("head_dim")
        if not width and isinstance(fields["width"], int) and isinstance(fields["heads"], int):
            width = max(1, fields["width"] // max(1, fields["heads"]))
        return fields | {"head_width": width, "tied": config.get("tie_word_embeddings")}

    def bias_fields(self, config: HFConfig) -> dict[str, Any]:
        """The fields about biases; a family without keys for them has those it always has."""
        for key in ("attention_bias", "mlp_bias"):
            if config.get(key):
                config.add_unsupported(key, "none here")
        return {}

    def rope_fields(self, config: HFConfig) -> dict[str, Any]:
        """The fields about rotary positions."""
        return rope_fields(config)

    def window_fields(self, config: HFConfig) -> dict[str, Any]:
        """The fields about sliding windows."""
        return window_fields(config, self.layer_kinds(config))

    def layer_kinds(self, config: HFConfig) -> list[str]:
        """The kind of every layer, as in `layer_types`."""
        layers = config.get("num_hidden_layers")
        if not is_layer_count(layers):
            return []
        return listed_kinds(config) or self.default_kinds(config, layers)

    def default_kinds(self, config: HFConfig, layers: int) -> list[str]:
        """The kind of every layer where no list says it: all have a window, if the model has one."""
        return [SLIDING] * layers

    def config_values(self, model: Model) -> dict[str, Any]:
        """The keys of a `config.json` that describe a model."""
        values: dict[str, Any] = {key: getattr(model, field) for key, field in self.required_keys.items()}
        values |= {"intermediate_size": model.mlp_dim, "hidden_act": "silu"}
        values |= {"num_key_value_heads": model.num_kv_heads, "head_dim": model.head_dim}
        return values | {"tie_word_embeddings": model.tied} | rope_values(model)

    def is_redundant(self, name: str, model: Model) -> bool:
        """Whether a tensor of a folder need not be imported, as an old table of rotary positions."""
        return name.endswith(".rotary_emb.inv_freq")

    def is_left_out(self, name: str, model: Model) -> bool:
        """Whether a tensor of a folder is of a part that Danlu's model does not have, which an import says."""
        return False

    def missing_traits(self, model: Model) -> list[str]:
        """Traits of the family that a model does not have, and would get."""
        return [trait for trait in self.traits if trait not in model_traits(model)]

    def unknown_traits(self, model: Model) -> list[str]:
        """Traits of a model that the family does not have."""
        return [trait for trait in model_traits(model) if trait not in (*self.traits, *self.optional_traits)]

    def fits(self, model: Model) -> bool:
        """Whether a model can be exported as one of this family."""
        return not self.missing_traits(model) and not self.unknown_traits(model)
