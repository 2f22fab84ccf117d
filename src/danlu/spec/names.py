"""Valid names and labels."""

import re
from typing import Annotated

from pydantic import AfterValidator, Field

from danlu.spec.text import is_printable

MAX_NAME_LENGTH = 100
MAX_LABEL_LENGTH = 200
NAME_PATTERN = rf"[A-Za-z0-9][A-Za-z0-9._-]{{0,{MAX_NAME_LENGTH - 1}}}"
"""A name occurs in paths, commands, URLs and pages, and is the same in all of them."""
NAME_RULE = f'letters, digits, ".", "_" and "-", the first a letter or digit, at most {MAX_NAME_LENGTH} characters'


def is_name(text: str) -> bool:
    """Whether this is a valid name of a run, a level, a tier or a dataset."""
    return re.fullmatch(NAME_PATTERN, text) is not None


def sanitize_name(text: str, otherwise: str = "run") -> str:
    """A valid name that resembles a wrong one."""
    kept = re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-._")
    return kept[:MAX_NAME_LENGTH].rstrip("-._") or otherwise


def _name(text: str) -> str:
    if not is_name(text):
        raise ValueError(f'{NAME_RULE}\nname = "{sanitize_name(text)}"')
    return text


def _label(text: str) -> str:
    if not text.strip() or len(text) > MAX_LABEL_LENGTH or not is_printable(text):
        raise ValueError(f"one line of 1 to {MAX_LABEL_LENGTH} printable characters")
    return text


Name = Annotated[str, AfterValidator(_name), Field(json_schema_extra={"pattern": f"^{NAME_PATTERN}$"})]
"""The name of something that becomes a folder or a key: a run, a level of the network, a storage tier."""
Label = Annotated[str, AfterValidator(_label), Field(json_schema_extra={"minLength": 1, "maxLength": MAX_LABEL_LENGTH})]
"""The display name of a model, a chip or a cluster."""
