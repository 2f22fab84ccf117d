"""Quantities with their units: `"80 GiB"`, `"50 GB/s"`, `"989 TFLOP/s"`, `"5 us"`.

In memory a quantity is a number of bytes, bytes per second, FLOP/s or seconds. In a file it is a string with its unit,
because `bandwidth = 25` was meant as 25 GB/s and read as 25 bytes per second.
"""

from decimal import Decimal
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    PlainSerializer,
    SerializationInfo,
    ValidationInfo,
    WithJsonSchema,
)

MAX_QUANTITY = 10**30
"""Above every valid quantity."""
IN_FILE = "in_file"
"""Key of pydantic's context: the values come from a file, so that units are required and ranges are those of real
machines. The same key writes quantities with their units."""
BARE_NUMBERS = "bare_numbers"
"""Key of pydantic's context: the file was written by a Danlu that did not write units yet."""

# Decimal, because 5 × 1e-6 in binary is not the number that 5e-6 is.
_SCALE = {prefix: Decimal(1000) ** power for power, prefix in enumerate(("", "k", "M", "G", "T", "P", "E"))}
_SCALE |= {f"{prefix}i": Decimal(1024) ** power for power, prefix in enumerate("KMGTPE", start=1)}
_BINARY = ("Gi", "Ti", "Pi")
"""Preferred for bytes that are an integer multiple of one of them."""
_SECONDS = {"ns": Decimal("1e-9"), "us": Decimal("1e-6"), "µs": Decimal("1e-6"), "ms": Decimal("1e-3")}
_SECONDS |= {"s": Decimal(1), "min": Decimal(60), "h": Decimal(3600), "d": Decimal(86400)}
_WORDS = {"B": "bytes", "B/s": "bytes per second", "FLOP/s": "FLOP per second", "s": "seconds"}
_WRITTEN = ("ns", "us", "ms", "s")
"""Units in which seconds are written: decimal ones, so that the text is exact."""


def _scales(unit: str) -> dict[str, Decimal]:
    return _SECONDS if unit == "s" else {prefix + unit: scale for prefix, scale in _SCALE.items()}


def format_quantity(value: float, unit: str) -> str:
    """A quantity as written to a file: exact, in the largest decimal unit that gives at least 1."""
    amount = Decimal(repr(value))
    if unit == "B" and (binary := [name for name in _BINARY if value and value % int(_SCALE[name]) == 0]):
        return f"{value // int(_SCALE[binary[-1]])} {binary[-1]}B"
    units = {name: _SECONDS[name] for name in _WRITTEN} if unit == "s" else _decimal_units(unit)
    name = max((name for name in units if abs(amount) >= units[name]), key=lambda name: units[name], default=unit)
    return f"{(amount / units[name]).normalize():f} {name}"


def _decimal_units(unit: str) -> dict[str, Decimal]:
    return {prefix + unit: scale for prefix, scale in _SCALE.items() if not prefix.endswith("i")}


def _parse_quantity(value: Any, unit: str, sample: str, kind: type[int] | type[float], info: ValidationInfo) -> Any:
    """Parse `"80 GiB"` as bytes, `"312 TFLOP/s"` as FLOP/s, `"5 us"` as seconds; a bare number only where allowed."""
    if not isinstance(value, str):
        if _bare(value) and _in(info, IN_FILE) and not _in(info, BARE_NUMBERS):
            raise ValueError(f'a string with its unit, such as "{sample}"\n{_meant(value, unit, sample)}')
        return value
    number, _, name = value.strip().partition(" ")
    name = name.strip()
    try:
        amount = Decimal(number) * _scales(unit)[name]
    except (ArithmeticError, KeyError):  # not a number, one beyond Decimal's range, or no unit
        raise ValueError(_expected(unit, name, sample)) from None
    if not amount.is_finite() or abs(amount) > MAX_QUANTITY:
        raise ValueError(_expected(unit, name, sample))
    return round(amount) if kind is int else float(amount)


def _bare(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _in(info: ValidationInfo | SerializationInfo, key: str) -> bool:
    return bool(info.context and info.context.get(key))


def _meant(value: float, unit: str, sample: str) -> str:
    """What a number without a unit would mean, and what was probably meant."""
    if not abs(value) < MAX_QUANTITY:  # not a number, or an integer too large to write
        return f'write "{sample}"'
    value = float(value)
    usual = f'write "{value:g} {sample.partition(" ")[2].replace("i", "")}"'
    small = abs(value) < 1e6
    return f"{value:g} {_WORDS[unit]}? {usual}" if small or unit == "s" else f'write "{format_quantity(value, unit)}"'


def _expected(unit: str, name: str, sample: str) -> str:
    """The expected form; data sheets give network speeds in bits, Danlu uses bytes."""
    bits = " (bytes, not bits: 400 Gb/s is 50 GB/s)" if unit == "B/s" and name.endswith(("b/s", "bps", "bit/s")) else ""
    return f'a number with its unit, such as "{sample}"{bits}'


def _within(value: Any, least: str, most: str, unit: str, info: ValidationInfo) -> Any:
    """Check that a quantity of a file is in the range of real machines."""
    if _in(info, IN_FILE) and not _read(least, unit) <= Decimal(repr(value)) <= _read(most, unit):
        raise ValueError(f"from {least} to {most}")
    return value


def _read(text: str, unit: str) -> Decimal:
    number, _, name = text.partition(" ")
    return Decimal(number) * _scales(unit)[name]


def _in_schema(unit: str, sample: str, least: str, most: str) -> WithJsonSchema:
    """In a file a quantity is a string with its unit."""
    units = "|".join(sorted(_scales(unit)))
    pattern = rf"^\s*[0-9.eE+-]+ +({units})\s*$"
    text = {"type": "string", "pattern": pattern, "examples": [sample], "x-unit": unit}
    return WithJsonSchema(text | {"x-least": least, "x-most": most}, mode="validation")


def _written(unit: str) -> PlainSerializer:
    def write(value: Any, info: SerializationInfo) -> Any:
        return format_quantity(value, unit) if _in(info, IN_FILE) else value

    return PlainSerializer(write)


def _quantity(unit: str, sample: str, kind: type[int] | type[float], least: str, most: str) -> tuple[Any, ...]:
    """Parser, bounds, serializer and schema of one kind of quantity."""
    return (
        BeforeValidator(lambda value, info: _parse_quantity(value, unit, sample, kind, info)),
        AfterValidator(lambda value, info: _within(value, least, most, unit, info)),
        _written(unit),
        _in_schema(unit, sample, least, most),
    )


_FINITE = Field(ge=0, allow_inf_nan=False)
_POSITIVE = Field(gt=0, allow_inf_nan=False)

Bytes = Annotated[int, Field(ge=0), *_quantity("B", "80 GiB", int, "0 B", "1000 EB")]
ChipMemory = Annotated[int, Field(gt=0), *_quantity("B", "80 GiB", int, "1 MB", "1 PB")]
"""Of one chip."""
Bandwidth = Annotated[float, _POSITIVE, *_quantity("B/s", "300 GB/s", float, "1 kB/s", "1 EB/s")]
Flops = Annotated[float, _POSITIVE, *_quantity("FLOP/s", "312 TFLOP/s", float, "1 MFLOP/s", "1000 EFLOP/s")]
Seconds = Annotated[float, _FINITE, *_quantity("s", "60 s", float, "0 s", "10000000 d")]
Latency = Annotated[float, _FINITE, *_quantity("s", "5 us", float, "0 s", "10 s")]
"""Of one message."""
Mtbf = Annotated[float, _POSITIVE, *_quantity("s", "30 d", float, "1 min", "10000000 d")]
"""Mean time between failures of one component."""
