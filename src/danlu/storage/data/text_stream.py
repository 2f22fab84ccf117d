"""Tokens into text while they arrive: characters are shown once they are complete."""

from collections.abc import Sequence

import numpy as np

from danlu.storage.data.tokenizer import Tokenizer

_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
_CONTEXT_TOKENS = 8
"""Tokens before the first that are decoded with it: some tokenizers write a space only between two words."""


class TextStream:
    """The text of tokens, in pieces that add up to what all of them decode to."""

    def __init__(self, tokenizer: Tokenizer, before: Sequence[int] = ()) -> None:
        """`before` are the tokens that come before the first, such as a prompt; their text is not repeated."""
        self._tokenizer = tokenizer
        self._shown = list(before)[-_CONTEXT_TOKENS:]
        self._waiting: list[int] = []

    def add(self, token: int) -> str:
        """The text that this token completes; empty while a character is incomplete."""
        self._waiting.append(token)
        text = self._new_text()
        if text.endswith(_INCOMPLETE):
            return ""
        self._shown, self._waiting = self._waiting, []
        return text

    def end(self) -> str:
        """What is left: bytes that no further token completes, each shown as �."""
        text = self._new_text() if self._waiting else ""
        self._waiting = []
        return text

    def _new_text(self) -> str:
        known = self._decode(self._shown)
        return self._decode([*self._shown, *self._waiting])[len(known) :]

    def _decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(np.array(tokens, dtype=np.uint32))
