"""Base of all descriptions: frozen, strict, and the same in text as in memory."""

from typing import Annotated, TypeVar

from pydantic import BaseModel, ConfigDict, Field

T = TypeVar("T")

TupleOf = Annotated[tuple[T, ...], Field(strict=False)]
"""A tuple that a TOML array may fill; what is inside stays strict."""


class SpecModel(BaseModel):
    """A frozen value that travels between rooms and round-trips through text.

    Strict: `"4"` is not 4 and an unknown key is an error, because a setting that is silently
    misread can cost a run.
    """

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        use_attribute_docstrings=True,
        ser_json_inf_nan="constants",  # a loss that is not a number is still an event
    )


MAX_COUNT = 10**15
"""Upper limit of integer fields without a narrower one."""
PositiveInt = Annotated[int, Field(ge=1, le=MAX_COUNT)]
