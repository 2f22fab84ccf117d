"""Problems of a file: location, value, what was expected, and the nearest valid name."""

from difflib import get_close_matches
from pathlib import Path
from reprlib import Repr
from typing import Any

from pydantic import ValidationError, ValidationInfo, field_validator

from danlu.spec.description import SpecModel
from danlu.spec.text import one_line

_LONGEST = 120
"""Longest key or name that is compared with others, and shown."""
_LONGEST_MESSAGE = 4000


class Problem(SpecModel):
    """One thing to fix, with its location."""

    file: str
    line: int
    key: str
    """Dotted path of the setting."""
    message: str
    """The value, and what was expected instead."""
    suggestion: str = ""
    """What to do; the nearest valid name, or the smallest change."""

    @field_validator("file", "key", "message", "suggestion")
    @classmethod
    def _fit_for_a_terminal(cls, text: str, info: ValidationInfo) -> str:
        longest = _LONGEST if info.field_name == "key" else _LONGEST_MESSAGE
        return one_line(text if len(text) <= longest else f"{text[:longest]}…")

    def __str__(self) -> str:
        text = f"{self.file}:{self.line}: {self.key}: {self.message}"
        return f"{text}\n    → {self.suggestion}" if self.suggestion else text


class SpecError(Exception):
    """A file cannot be used; carries every problem found, not just the first."""

    def __init__(self, problems: list[Problem]) -> None:
        self.problems = problems
        super().__init__("\n".join(str(problem) for problem in problems))


_ALIASES = {
    "bfloat16": "bf16",
    "context_length": "sequence",
    "dp": "shard",
    "float16": "fp16",
    "float32": "fp32",
    "float64": "fp64",
    "fsdp": "shard",
    "global_batch_size": "sequences",
    "half": "fp16",
    "hidden_size": "width",
    "intermediate_size": "mlp_width",
    "lr": "learning_rate",
    "max_position_embeddings": "sequence",
    "max_steps": "steps",
    "num_attention_heads": "heads",
    "num_experts": "experts",
    "num_hidden_layers": "layers",
    "num_key_value_heads": "kv_heads",
    "seq_len": "length",
    "seq_length": "length",
    "vocab_size": "vocabulary",
}
"""Names in other systems."""


def closest_name(name: str, valid: list[str]) -> str | None:
    """The valid name that `name` is an alias of, or is closest to; None if none is close."""
    if _ALIASES.get(name) in valid:
        return _ALIASES[name]
    if len(name) > _LONGEST:  # not a misspelling, and comparing is quadratic in its length
        return None
    return next(iter(get_close_matches(name, valid, n=1, cutoff=0.5)), None)


def suggest_name(name: str, valid: list[str]) -> str:
    """A suggestion that names the valid name closest to `name`, or all of them if few and none is close."""
    if close := closest_name(name, valid):
        return f"did you mean `{close}`?"
    return f"one of: {', '.join(sorted(valid))}" if len(valid) <= 20 else ""


def format_key(key: tuple[str | int, ...]) -> str:
    """A key as a person writes it: `levels[0].latency`."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in key)
    return text.removeprefix(".")


def problem_at(path: Path, line: int, key: str, message: str, suggestion: str = "") -> Problem:
    """A problem at a line of a file."""
    return Problem(file=str(path), line=line, key=key, message=message, suggestion=suggestion)


_REPR = Repr()
_REPR.maxlist = _REPR.maxdict = 20


def expected_from(error: ValidationError) -> str:
    """What the first problem that pydantic found expected."""
    detail = error.errors(include_url=False)[0]
    text = str(detail["ctx"]["error"]) if detail["type"] == "value_error" else detail["msg"]
    return text.partition("\n")[0].removeprefix("Input should be ")


def format_value(value: Any) -> str:
    """A value as in the file, truncated to fit in a line."""
    text = f'"{value}"' if isinstance(value, str) else str(value).lower() if isinstance(value, bool) else _brief(value)
    text = one_line(text)
    return text if len(text) <= 60 else text[:57] + "…"


def _brief(value: Any) -> str:
    """A value that is not a string, of any size: integers may have more digits than Python writes."""
    if isinstance(value, int) and abs(value) >= 10**50:
        return f"a number of about 10^{int(value.bit_length() * 0.30103)}"
    return _REPR.repr(value) if isinstance(value, dict | list) else str(value)
