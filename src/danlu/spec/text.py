"""Text from a file or a flag, made safe for a terminal or a page."""

import re

_UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufeff]")
"""Control characters (C0 and C1 except tab and newline), bidirectional controls, and lone surrogates that no encoding
can write."""
_BREAKS = str.maketrans({"\n": r"\n", "\t": r"\t"})


def printable(text: str) -> str:
    r"""The same text with every control character escaped: `\u001b[31m`.

    All text from files passes through here before it is shown: a run's name must not be able to clear the screen, set
    the window's title or hide the line above.
    """
    return _UNSAFE.sub(_written_out, text)


def one_line(text: str) -> str:
    """As `printable`, with line breaks and tabs escaped too."""
    return printable(text).translate(_BREAKS)


def is_printable(text: str) -> bool:
    """Whether a terminal shows every character of one line of text."""
    return one_line(text) == text


def _written_out(found: re.Match[str]) -> str:
    return f"\\u{ord(found[0]):04x}"  # as JSON writes it, so that JSON is unchanged
