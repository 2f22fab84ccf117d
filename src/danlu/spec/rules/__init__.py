"""Rules between settings, one small function each, grouped by the files they need."""

from danlu.spec.rules.batch import BATCH_RULES, RAMP_RULES
from danlu.spec.rules.context import CONTEXT_RULES
from danlu.spec.rules.custom_model import CUSTOM_AXIS_RULES
from danlu.spec.rules.data import DATA_RULES
from danlu.spec.rules.expert_dispatch import EXPERT_DISPATCH_RULES
from danlu.spec.rules.loss_chunks import CUSTOM_LOSS_CHUNK_RULES, DECODER_LOSS_CHUNK_RULES, LOSS_CHUNK_RULES
from danlu.spec.rules.matmul import (
    DECODER_MATMUL_LAYOUT_RULES,
    DECODER_MATMUL_RULES,
    MATMUL_LAYOUT_RULES,
    MATMUL_RULES,
)
from danlu.spec.rules.network import CHIP_RULES, MAPPING_RULES, NETWORK_RULES, mapping_needs_cluster
from danlu.spec.rules.operators import CUSTOM_OPERATOR_RULES, DECODER_OPERATOR_RULES, OPERATOR_RULES
from danlu.spec.rules.optimizer import OPTIMIZER_RULES, group_patterns_match, group_problems
from danlu.spec.rules.pipeline import PIPELINE_RULES, STAGE_RULES
from danlu.spec.rules.recipe import DECODER_SETTING_RULES, SETTING_RULES, precision_module_names
from danlu.spec.rules.regather import CUSTOM_REGATHER_RULES, DECODER_REGATHER_RULES, REGATHER_RULES
from danlu.spec.rules.shape import SHAPE_RULES
from danlu.spec.rules.spikes import SPIKE_RULES
from danlu.spec.rules.state_sharding import STATE_SHARDING_LAYOUT_RULES, STATE_SHARDING_RULES

RECIPE_RULES = (*SETTING_RULES, *RAMP_RULES, *OPTIMIZER_RULES, *DATA_RULES, *SPIKE_RULES, *MATMUL_RULES)
"""Rules inside a recipe."""
DECODER_RECIPE_RULES = (*DECODER_SETTING_RULES, *DECODER_MATMUL_RULES, group_patterns_match)
"""The same, where the model is described by its shape."""
PLAN_RULES = (
    *STAGE_RULES,
    *REGATHER_RULES,
    *LOSS_CHUNK_RULES,
    *STATE_SHARDING_RULES,
    *CONTEXT_RULES,
    *EXPERT_DISPATCH_RULES,
    *OPERATOR_RULES,
    *MAPPING_RULES,
)
"""Rules inside a plan."""
LAYOUT_RULES = (*BATCH_RULES, *MATMUL_LAYOUT_RULES, *STATE_SHARDING_LAYOUT_RULES)
"""Rules between a recipe and a plan."""
DECODER_LAYOUT_RULES = (
    *SHAPE_RULES,
    *PIPELINE_RULES,
    *DECODER_REGATHER_RULES,
    *DECODER_LOSS_CHUNK_RULES,
    *DECODER_MATMUL_LAYOUT_RULES,
    *DECODER_OPERATOR_RULES,
)
"""The same, where the model is described by its shape."""
CUSTOM_LAYOUT_RULES = (
    *CUSTOM_AXIS_RULES,
    *CUSTOM_REGATHER_RULES,
    *CUSTOM_LOSS_CHUNK_RULES,
    *CUSTOM_OPERATOR_RULES,
)
"""The same, where the model is a custom module."""

__all__ = [
    "CHIP_RULES",
    "CUSTOM_LAYOUT_RULES",
    "DECODER_LAYOUT_RULES",
    "DECODER_RECIPE_RULES",
    "LAYOUT_RULES",
    "NETWORK_RULES",
    "PLAN_RULES",
    "RECIPE_RULES",
    "group_problems",
    "mapping_needs_cluster",
    "precision_module_names",
]
