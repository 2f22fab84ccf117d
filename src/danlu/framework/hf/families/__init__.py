"""The Hugging Face families that Danlu's decoder supports, a file each: a new one is a file and its line here."""

from itertools import combinations

from danlu.framework.hf.families.deepseek_v3 import DeepseekV3
from danlu.framework.hf.families.family import ModelFamily
from danlu.framework.hf.families.gemma import Gemma2, Gemma3
from danlu.framework.hf.families.gpt_oss import GptOss
from danlu.framework.hf.families.llama import Llama
from danlu.framework.hf.families.mistral import Mistral
from danlu.framework.hf.families.mixtral import Mixtral
from danlu.framework.hf.families.qwen2 import Qwen2
from danlu.framework.hf.families.qwen3 import Qwen3
from danlu.framework.hf.families.traits import model_traits
from danlu.spec.model import Model

FAMILIES: dict[str, ModelFamily] = {
    family.model_type: family
    for family in (Llama(), Mistral(), Qwen2(), Qwen3(), Mixtral(), DeepseekV3(), Gemma2(), Gemma3(), GptOss())
}
"""By `model_type`; a model that several families have is exported as the first of them."""


def find_family(model: Model) -> ModelFamily | None:
    """The family that a model is exported as: the one it was imported from if that still fits, else by its traits."""
    fitting = [family for family in FAMILIES.values() if family.fits(model)]
    origin = next((family for family in fitting if model.source.startswith(family.architecture)), None)
    return origin or next(iter(fitting), None)


def unsupported_trait(model: Model) -> str:
    """Why a model is none of the families': what it has and who does not support it, as a text that follows "has"."""
    traits = model_traits(model)
    known = [{*family.traits, *family.optional_traits} for family in FAMILIES.values()]
    *others, last = (family.title for family in FAMILIES.values())
    none = f"which {', '.join(others)} and {last} do not support"
    for trait, text in traits.items():
        if not any(trait in own for own in known):
            return f"{text}, {none}"
    for one, other in combinations(traits, 2):
        if not any({one, other} <= own for own in known):
            pair = f"{traits[one]} in an MoE model" if other == "moe" else f"{traits[one]} and {traits[other]} together"
            return f"{pair}, {none}"
    closest = min(FAMILIES.values(), key=lambda family: len({*traits} ^ {*family.traits}))
    if unknown := closest.unknown_traits(model):
        return f"{traits[unknown[0]]}, which {closest.title} does not support"
    return f"no {closest.missing_traits(model)[0]}, which every model of {closest.title} has"


__all__ = ["FAMILIES", "ModelFamily", "find_family", "unsupported_trait"]
