"""Text from a model and its tokenizer: prompts in, samples out, piece by piece while they are drawn."""

from dataclasses import dataclass
from typing import Protocol

from torch import nn

from danlu.framework.generation import generate
from danlu.framework.layer_seeds import hash_seed
from danlu.framework.sampling import Sampling
from danlu.spec.samples import Sample, SampleEnd
from danlu.storage.data.text_stream import TextStream
from danlu.storage.data.tokenizer import Tokenizer


class PromptTooLongError(ValueError):
    """A prompt leaves no room for a token in the model's context."""


class SampleListener(Protocol):
    """Hears of samples while they are drawn, all of one prompt at the same time."""

    def on_text(self, sample: int, piece: str) -> None:
        """More text of a sample, in complete characters."""
        ...

    def on_end(self, sample: int) -> None:
        """A sample has ended."""
        ...


@dataclass(frozen=True, kw_only=True)
class TextCodec:
    """How text becomes the tokens of a model, and back."""

    tokenizer: Tokenizer
    end_of_text: int
    """Token that ends a document in the training data."""
    context: int
    """Most tokens that the model supports, prompt and text together."""

    def encode(self, prompt: str) -> list[int]:
        """The tokens of a prompt, as in the training data; an empty one begins a new document."""
        tokens = [int(token) for token in self.tokenizer.encode(prompt)] or [self.end_of_text]
        if len(tokens) >= self.context:
            raise PromptTooLongError(
                f"the prompt has {len(tokens):,} tokens, but must have fewer than the model's context of "
                f"{self.context:,}: shorten it"
            )
        return tokens


def sample_text(
    model: nn.Module,
    codec: TextCodec,
    prompt: str,
    sampling: Sampling,
    *,
    tokens: int,
    seed: int = 0,
    count: int = 1,
    listener: SampleListener | None = None,
) -> list[Sample]:
    """Continue a prompt `count` times; a sample depends on `seed`, the prompt and its own number alone.

    The model must be whole in this process; the listener hears of every piece of text as soon as it is complete.
    """
    ids = codec.encode(prompt)
    length = min(tokens, codec.context - len(ids))
    streams = [TextStream(codec.tokenizer, ids) for _ in range(count)]
    texts, lengths, over = [""] * count, [0] * count, [False] * count

    def add(number: int, piece: str) -> None:
        texts[number] += piece
        if piece and listener is not None:
            listener.on_text(number, piece)

    def end(number: int) -> None:
        add(number, streams[number].end())
        over[number] = True
        if listener is not None:
            listener.on_end(number)

    for step in generate(
        model,
        ids,
        sampling,
        tokens=length,
        seed=hash_seed(seed, prompt),
        count=count,
        end_of_text=codec.end_of_text,
        vocabulary=codec.tokenizer.vocabulary,
    ):
        for number, token in enumerate(step):
            if token is not None:
                lengths[number] += 1
                add(number, streams[number].add(token))
            elif not over[number]:
                end(number)
    for number in range(count):
        if not over[number]:
            end(number)
    full: SampleEnd = "tokens" if length == tokens else "context"
    return [
        Sample(prompt=prompt, text=text, tokens=drawn, ended="end of text" if drawn < length else full)
        for text, drawn in zip(texts, lengths, strict=True)
    ]
