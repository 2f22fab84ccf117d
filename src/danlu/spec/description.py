"""What every description shares: frozen, strict, and the same in text as in memory."""

from decimal import Decimal, InvalidOperation
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema

T = TypeVar("T")

Many = Annotated[tuple[T, ...], Field(strict=False)]
"""A tuple that a TOML array may fill; what is inside stays strict."""


class Description(BaseModel):
    """A frozen value that travels between rooms and round-trips through text.

    Strict: `"4"` is not 4 and an unknown key is an error, because a setting that is quietly
    read as something else is the kind of mistake that costs a run.
    """

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        use_attribute_docstrings=True,
        ser_json_inf_nan="constants",  # a loss that is not a number is still an event
    )


# Decimal, because 5 × 1e-6 in binary is not the number that 5e-6 is.
_SCALE = {prefix: Decimal(1000) ** power for power, prefix in enumerate(("", "k", "M", "G", "T", "P", "E"))}
_SCALE |= {f"{prefix}i": Decimal(1024) ** power for power, prefix in enumerate("KMGTPE", start=1)}
_SECONDS = {"ns": Decimal("1e-9"), "us": Decimal("1e-6"), "µs": Decimal("1e-6"), "ms": Decimal("1e-3")}
_SECONDS |= {"s": Decimal(1), "min": Decimal(60), "h": Decimal(3600), "d": Decimal(86400)}
_SAMPLE = {"B": "80 GiB", "B/s": "300 GB/s", "FLOP/s": "312 TFLOP/s", "s": "5 us"}


def _scales(unit: str) -> dict[str, Decimal]:
    return _SECONDS if unit == "s" else {prefix + unit: scale for prefix, scale in _SCALE.items()}


def _amount(value: Any, unit: str, kind: type[int] | type[float]) -> Any:
    """Read `"80 GiB"` as bytes, `"312 TFLOP/s"` as FLOP/s, `"5 us"` as seconds; leave numbers alone."""
    if not isinstance(value, str):
        return value
    number, _, name = value.strip().partition(" ")
    name = name.strip()
    try:
        amount = Decimal(number) * _scales(unit)[name]
    except (InvalidOperation, KeyError):
        raise ValueError(_expected(unit, name)) from None
    if not amount.is_finite():
        raise ValueError(_expected(unit, name))
    return round(amount) if kind is int else float(amount)


def _expected(unit: str, name: str) -> str:
    """What a text with this unit looks like; data sheets give networks in bits, we count bytes."""
    bits = " (bytes, not bits: 400 Gb/s is 50 GB/s)" if unit == "B/s" and name.endswith(("b/s", "bps", "bit/s")) else ""
    return f'a number or a text such as "{_SAMPLE[unit]}"{bits}'


def _in_schema(number: dict[str, Any], unit: str) -> WithJsonSchema:
    """In a file a quantity is a number or a text with its unit."""
    units = "|".join(sorted(_scales(unit)))
    text = {"type": "string", "pattern": rf"^\s*[0-9.eE+-]+ +({units})\s*$", "examples": [_SAMPLE[unit]]}
    return WithJsonSchema({"anyOf": [number, text]}, mode="validation")


_POSITIVE = {"type": "number", "exclusiveMinimum": 0}
Bytes = Annotated[
    int,
    BeforeValidator(lambda v: _amount(v, "B", int)),
    Field(ge=0),
    _in_schema({"type": "integer", "minimum": 0}, "B"),
]
Bandwidth = Annotated[
    float,
    BeforeValidator(lambda v: _amount(v, "B/s", float)),
    Field(gt=0, allow_inf_nan=False),
    _in_schema(_POSITIVE, "B/s"),
]
Flops = Annotated[
    float,
    BeforeValidator(lambda v: _amount(v, "FLOP/s", float)),
    Field(gt=0, allow_inf_nan=False),
    _in_schema(_POSITIVE, "FLOP/s"),
]
Seconds = Annotated[
    float,
    BeforeValidator(lambda v: _amount(v, "s", float)),
    Field(ge=0, allow_inf_nan=False),
    _in_schema({"type": "number", "minimum": 0}, "s"),
]
Count = Annotated[int, Field(ge=1)]
