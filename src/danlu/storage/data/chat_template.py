"""Conversations as the text that a chat model reads: the chat template of its tokenizer, and where its answers are.

A template is Jinja, in `chat_template.jinja` or `tokenizer_config.json` beside a `tokenizer.json`. It runs in a
sandbox: it comes with a downloaded model.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from danlu.spec import SpecError
from danlu.spec.files import read_bytes
from danlu.spec.problem import format_value, problem_at

MAX_TEMPLATE_BYTES = 4 << 20
"""Largest template or tokenizer_config.json; those in use have some 100 kB at most."""
ANSWER_ROLE = "assistant"

_ANSWER_START, _ANSWER_END = "\ue0f0", "\ue0f1"
"""What marks the `generation` blocks of a template while it is rendered: private-use characters, then removed."""
_MARKED_HINT = "add `{% generation %}` and `{% endgeneration %}` around the answers in the template"
_FIX_HINT = "fix it, or skip (and count) such lines with --skip-bad"


class ConversationError(Exception):
    """A line is no conversation that the template can render."""

    def __init__(self, reason: str, message: str, suggestion: str = _FIX_HINT) -> None:
        super().__init__(message)
        self.reason, self.message, self.suggestion = reason, message, suggestion


class DocumentText(NamedTuple):
    """The text of a document, and of a conversation where its answers are."""

    text: str
    answers: tuple[tuple[int, int], ...] | None = None
    """First character of each answer and the one after its last, its end token included; None if it is plain text."""


@dataclass(frozen=True)
class ChatTemplate:
    """A template with what it is given besides messages."""

    source: str
    """In Jinja."""
    variables: tuple[tuple[str, str], ...] = ()
    """Names and texts such as `bos_token` and `eos_token`."""
    special_tokens: tuple[str, ...] = ()
    """Texts of the tokenizer's special tokens, which no message may contain."""

    @property
    def fingerprint(self) -> str:
        """A hash of what decides the text of a conversation."""
        return hashlib.sha256(repr((self.source, self.variables)).encode()).hexdigest()

    def render(self, conversation: Mapping[str, Any], field: str) -> DocumentText:
        """The text of a JSON line with messages in `field`; raises `ConversationError`."""
        messages = self._checked_messages(conversation, field)
        given = {"tools": conversation.get("tools"), "documents": conversation.get("documents")}
        text = self._render(messages, given)
        if _ANSWER_START in text:
            text, answers = _remove_marks(text)
        else:
            answers = tuple(self._answers_by_prefix(messages, given, text))
        for start, end in answers:
            if not any(token in text[start:end] for token in self.special_tokens):
                message = f"has an answer that ends with no special token: {format_value(text[start:end][-40:])}"
                hint = "a model would not learn to stop: end answers with `{{ eos_token }}` in the template"
                raise ConversationError("answer without end", message, hint)
        return DocumentText(text, answers)

    def _checked_messages(self, conversation: Mapping[str, Any], field: str) -> Sequence[Mapping[str, Any]]:
        messages = conversation[field]
        if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
            raise ConversationError("not a conversation", f"is {format_value(messages)}, but must list messages")
        for number, message in enumerate(messages):
            is_text = isinstance(message.get("content"), str) or bool(message.get("tool_calls"))
            if not isinstance(message.get("role"), str) or not is_text:
                found = f"has message {number} as {format_value(message)}"
                raise ConversationError("not a conversation", f"{found}, without a `role` or a text as `content`")
        if not any(message["role"] == ANSWER_ROLE for message in messages):
            raise ConversationError("no answer", f'has no message of role "{ANSWER_ROLE}": nothing would be learned')
        for text in _texts([messages, conversation.get("tools"), conversation.get("documents")]):
            for token in (*self.special_tokens, _ANSWER_START, _ANSWER_END):
                if token in text:
                    found = f"has {format_value(token)} in a message"
                    raise ConversationError("special token", f"{found}, which would be read as a special token")
            try:
                text.encode()
            except UnicodeEncodeError:
                message = "contains an unpaired UTF-16 surrogate, which is not a character"
                raise ConversationError("not Unicode", message) from None
        return messages

    def _answers_by_prefix(
        self, messages: Sequence[Mapping[str, Any]], given: dict[str, Any], text: str
    ) -> Iterator[tuple[int, int]]:
        """An answer is what its message adds to the messages before it and the prompt for it."""
        for number, message in enumerate(messages):
            if message["role"] != ANSWER_ROLE:
                continue
            before = self._render(messages[:number], given, add_generation_prompt=True)
            after = self._render(messages[: number + 1], given)
            if not (text.startswith(after) and after.startswith(before)):
                found = f"has an answer, message {number}, whose text depends on messages after it, or changes others"
                raise ConversationError("not a prefix", f"{found}: where it begins is not known", _MARKED_HINT)
            yield len(before), len(after)

    def _render(
        self, messages: Sequence[Mapping[str, Any]], given: dict[str, Any], add_generation_prompt: bool = False
    ) -> str:
        names = {"messages": messages, "add_generation_prompt": add_generation_prompt} | dict(self.variables) | given
        try:
            return str(_compile(self.source).render(names))
        except Exception as error:  # the template is code of the model's makers and may raise anything
            raise ConversationError("not rendered", f"is refused by the chat template: {error}") from None


def load_chat_template(tokenizer_file: Path, special_tokens: Sequence[str]) -> ChatTemplate:
    """The template beside a `tokenizer.json`; raises if there is none that can be compiled."""
    from jinja2 import TemplateError

    config_file = tokenizer_file.with_name("tokenizer_config.json")
    own_file = tokenizer_file.with_name("chat_template.jinja")
    config = _read_config(config_file)
    file = own_file if own_file.is_file() else config_file
    try:
        source = read_bytes(own_file, MAX_TEMPLATE_BYTES).decode() if file == own_file else _template_in(config)
    except UnicodeDecodeError as error:
        raise SpecError([problem_at(file, 1, "chat_template", f"is not UTF-8: {error.reason}")]) from None
    if not source:
        message = f"has no chat template: neither {own_file.name} nor `chat_template` in {config_file.name}"
        hint = "put the template of the model beside its tokenizer.json"
        raise SpecError([problem_at(tokenizer_file.parent, 1, "chat_template", message, hint)])
    try:
        _compile(source)
    except TemplateError as error:
        message = f"is not a chat template: {error}"
        raise SpecError([problem_at(file, getattr(error, "lineno", 1) or 1, "chat_template", message)]) from None
    variables = {name: _token_text(value) for name, value in config.items() if name.endswith("_token")}
    return ChatTemplate(source, tuple(sorted((k, v) for k, v in variables.items() if v)), tuple(special_tokens))


def _read_config(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        config = json.loads(read_bytes(file, MAX_TEMPLATE_BYTES))
    except ValueError as error:
        raise SpecError([problem_at(file, 1, "file", f"is not JSON: {error}")]) from None
    return config if isinstance(config, dict) else {}


def _template_in(config: Mapping[str, Any]) -> str:
    """A text, or several by name, of which `default` is for conversations."""
    found = config.get("chat_template", "")
    if isinstance(found, list):
        named = {each.get("name"): each.get("template") for each in found if isinstance(each, dict)}
        found = named.get("default", "")
    return found if isinstance(found, str) else ""


def _token_text(value: Any) -> str:
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else ""


def _texts(value: Any) -> Iterator[str]:
    """Every string in a JSON value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _texts(inner)


def _remove_marks(text: str) -> tuple[str, tuple[tuple[int, int], ...]]:
    """The text without the marks of answers, and where they were."""
    pieces = text.split(_ANSWER_START)
    plain, answers = pieces[0], []
    for piece in pieces[1:]:
        answer, _, rest = piece.partition(_ANSWER_END)
        answers.append((len(plain), len(plain) + len(answer)))
        plain += answer + rest
    return plain, tuple(answers)


@lru_cache(maxsize=4)
def _compile(source: str) -> Any:
    """The template in a sandbox: it reads what it is given and nothing else.

    There is no clock: shards of one source are the same every day.
    """
    from jinja2 import TemplateError, nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class GenerationBlock(Extension):
        """`{% generation %}`: what the model is to write."""

        tags = {"generation"}  # noqa: RUF012  (Jinja's own interface)

        def parse(self, parser: Parser) -> list[nodes.Node]:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            start, end = (
                nodes.Output([nodes.TemplateData(mark)], lineno=line) for mark in (_ANSWER_START, _ANSWER_END)
            )
            return [start, *body, end]

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = raise_exception
    return environment.from_string(source)


def _to_json(value: Any, **options: Any) -> str:
    """JSON for a model and not for a web page: nothing is escaped."""
    return json.dumps(value, **{"ensure_ascii": False} | options)
