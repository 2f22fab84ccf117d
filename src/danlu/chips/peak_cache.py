"""Measured peaks of this machine, kept from run to run in a small file of the user's cache.

One measurement at the start of a run says as much about the machine's other load as about the machine. The best of
many, over several runs, is what it can reach; MFU of two runs relative to it can be compared.
"""

import json
import os
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

MAX_RATES = 60
"""Newest measurements kept per machine: a rate that it no longer reaches expires in time."""


@dataclass(frozen=True)
class MeasuredPeak:
    """Measured FLOP/s of all ranks together, oldest first."""

    rates: tuple[float, ...]

    @property
    def best(self) -> float:
        """The highest: other work on the machine only ever lowers a rate."""
        return max(self.rates)

    @property
    def spread(self) -> float:
        """How far the lowest is below the best, as a fraction of the best."""
        return 1 - min(self.rates) / self.best


def update_peak_cache(file: Path | None, machine: str, fresh: tuple[float, ...]) -> MeasuredPeak:
    """Add the fresh measurements to the cached ones of the same machine, and return all of them.

    `machine` names everything that must be equal for rates to be comparable. A cache that cannot be read or written is
    ignored.
    """
    if file is None:
        return MeasuredPeak(fresh)
    known = _read(file)
    known[machine] = [*known.get(machine, []), *fresh][-MAX_RATES:]
    with suppress(OSError):
        _write(file, known)
    return MeasuredPeak(tuple(known[machine]))


def _read(file: Path) -> dict[str, list[float]]:
    """The file's contents; empty if it does not exist or this module did not write it."""
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    if not isinstance(values, dict):
        return {}
    return {name: rates for name, rates in values.items() if isinstance(rates, list) and all(map(_is_rate, rates))}


def _is_rate(value: object) -> bool:
    return isinstance(value, float | int) and 0 < value < 1e30


def _write(file: Path, known: dict[str, list[float]]) -> None:
    """Write atomically, readable by the owner only; of two runs that start at once the later one's rates are kept."""
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=file.parent, prefix=".peaks-")  # created with mode 600
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
            json.dump(known, stream, indent=1)
        Path(name).replace(file)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
