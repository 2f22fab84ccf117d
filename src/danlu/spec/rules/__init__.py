"""What one setting asks of another, a small function a rule, grouped by the files it must see."""

from danlu.spec.rules.batch import BATCH_RULES
from danlu.spec.rules.data import DATA_RULES
from danlu.spec.rules.network import CHIP_RULES, NETWORK_RULES, PLACE_RULES, mapping_needs_cluster
from danlu.spec.rules.own_model import OWN_LAYOUT_RULES
from danlu.spec.rules.pipeline import PIPELINE_RULES, STAGE_RULES
from danlu.spec.rules.recipe import DESCRIBED_RECIPE_RULES, SETTING_RULES, precision_names
from danlu.spec.rules.shape import SHAPE_RULES

RECIPE_RULES = (*SETTING_RULES, *DATA_RULES)
"""Rules inside a recipe."""
PLAN_RULES = (*STAGE_RULES, *PLACE_RULES)
"""Rules inside a plan."""
LAYOUT_RULES = BATCH_RULES
"""Rules between a recipe and a plan."""
DESCRIBED_LAYOUT_RULES = (*SHAPE_RULES, *PIPELINE_RULES)
"""The same, where the model is described by its shape."""

__all__ = [
    "CHIP_RULES",
    "DESCRIBED_LAYOUT_RULES",
    "DESCRIBED_RECIPE_RULES",
    "LAYOUT_RULES",
    "NETWORK_RULES",
    "OWN_LAYOUT_RULES",
    "PLAN_RULES",
    "RECIPE_RULES",
    "mapping_needs_cluster",
    "precision_names",
]
