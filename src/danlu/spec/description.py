"""What every description shares: frozen, strict, and the same in text as in memory."""

from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

T = TypeVar("T")

Many = Annotated[tuple[T, ...], Field(strict=False)]
"""A tuple that a TOML array may fill; what is inside stays strict."""


class Description(BaseModel):
    """A frozen value that travels between rooms and round-trips through text.

    Strict: `"4"` is not 4 and an unknown key is an error, because a setting that is quietly
    read as something else is the kind of mistake that costs a run.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True)


_SCALE = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "E": 1e18}
_SCALE |= {f"{prefix}i": 1024.0**power for power, prefix in enumerate("KMGTPE", start=1)}
_SECONDS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}


def _amount(value: Any, unit: str, kind: type[int] | type[float]) -> Any:
    """Read `"80 GiB"` as bytes, `"312 TFLOP/s"` as FLOP/s, `"5 us"` as seconds; leave numbers alone."""
    if not isinstance(value, str):
        return value
    number, _, name = value.strip().partition(" ")
    scales = _SECONDS if unit == "s" else {prefix + unit: scale for prefix, scale in _SCALE.items()}
    try:
        return kind(float(number) * scales[name.strip()])
    except (ValueError, KeyError):
        sample = {"B": "80 GiB", "B/s": "300 GB/s", "FLOP/s": "312 TFLOP/s", "s": "5 us"}[unit]
        raise ValueError(f"a number or a text such as {sample!r}") from None


Bytes = Annotated[int, BeforeValidator(lambda v: _amount(v, "B", int)), Field(ge=0)]
Bandwidth = Annotated[float, BeforeValidator(lambda v: _amount(v, "B/s", float)), Field(gt=0)]
Flops = Annotated[float, BeforeValidator(lambda v: _amount(v, "FLOP/s", float)), Field(gt=0)]
Seconds = Annotated[float, BeforeValidator(lambda v: _amount(v, "s", float)), Field(ge=0)]
Count = Annotated[int, Field(ge=1)]
