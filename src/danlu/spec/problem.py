"""What is wrong with a file: where, which value, what was expected, and the nearest valid name."""

from difflib import get_close_matches
from pathlib import Path
from typing import Any

from danlu.spec.description import Description


class Problem(Description):
    """One thing to mend, with its place."""

    file: str
    line: int
    key: str
    """Dotted path of the setting."""
    message: str
    """The value, and what was expected instead."""
    suggestion: str = ""
    """What to do; the nearest valid name, or the smallest change."""

    def __str__(self) -> str:
        text = f"{self.file}:{self.line}: {self.key}: {self.message}"
        return f"{text}\n    → {self.suggestion}" if self.suggestion else text


class SpecError(Exception):
    """A file cannot be used; carries every problem found, not just the first."""

    def __init__(self, problems: list[Problem]) -> None:
        self.problems = problems
        super().__init__("\n".join(str(problem) for problem in problems))


_ELSEWHERE = {
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
"""What other systems call it."""


def meant(name: str, valid: list[str]) -> str | None:
    """The valid name that `name` is another word for, or is closest to; None if none is close."""
    if _ELSEWHERE.get(name) in valid:
        return _ELSEWHERE[name]
    return next(iter(get_close_matches(name, valid, n=1, cutoff=0.5)), None)


def nearest(name: str, valid: list[str]) -> str:
    """A suggestion that names the valid name closest to `name`, or all of them if few and none is close."""
    if close := meant(name, valid):
        return f"did you mean `{close}`?"
    return f"one of: {', '.join(sorted(valid))}" if len(valid) <= 20 else ""


def dotted(key: tuple[str | int, ...]) -> str:
    """A key as a person writes it: `levels[0].latency`."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in key)
    return text.removeprefix(".")


def problem_at(path: Path, line: int, key: str, message: str, suggestion: str = "") -> Problem:
    """A problem in a file, by its place."""
    return Problem(file=str(path), line=line, key=key, message=message, suggestion=suggestion)


def shown(value: Any) -> str:
    """A value as it stands in the file, cut to what fits in a line."""
    text = f'"{value}"' if isinstance(value, str) else str(value).lower() if isinstance(value, bool) else str(value)
    return text if len(text) <= 60 else text[:57] + "…"
