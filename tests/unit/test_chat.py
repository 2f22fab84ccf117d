"""Conversations: rendered as transformers renders them, answers alone counted, and refused where that is not known."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chat_data import ASSISTANT, END, TEMPLATE, USER, make_conversations, make_tokenizer
from made_meshes import place_of
from pydantic import create_model
from typer.testing import CliRunner

from danlu.cli.app import app
from danlu.framework.batch_loader import BatchLoader
from danlu.parallel.batch import IGNORE_INDEX
from danlu.spec import SpecError
from danlu.spec.description import SpecModel
from danlu.spec.recipe import BatchConfig
from danlu.storage.data.build import build_dataset
from danlu.storage.data.chat_template import ChatTemplate, ConversationError
from danlu.storage.data.dataset_index import DatasetIndex
from danlu.storage.data.token_marks import unpack_marks
from danlu.storage.data.token_shards import ShuffledDataset, TokenShards
from danlu.storage.data.tokenizer import BytesTokenizer, HuggingFaceTokenizer, open_chat_template, open_tokenizer

TALK = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "1 + 1?  "},
    {"role": "assistant", "content": "Two – “2”."},
    {"role": "user", "content": "naïve?"},
    {"role": "assistant", "content": "\nNo"},
]
CHATML = (
    "{%- for message in messages %}\n"
    "    {{- '<|user|>' + message['role'] + '\\n' + message['content'] | trim + eos_token + '\\n' }}\n"
    "{%- endfor %}\n"
    "{%- if add_generation_prompt %}\n"
    "    {{- '<|user|>assistant\\n' }}\n"
    "{%- endif %}\n"
)
GENERATION = (
    "{% for message in messages %}{% if message.role == 'assistant' %}"
    "<|assistant|>{% generation %}{{ message.content | trim }}{{ eos_token }}{% endgeneration %}"
    "{% else %}<|user|>{{ message.content }}{% endif %}{% if loop.last %}{% break %}{% endif %}{% endfor %}"
)
TOOLS = "{% if tools %}{{ tools | tojson(indent=2) }}{% endif %}" + TEMPLATE


def template_of(source: str) -> ChatTemplate:
    return ChatTemplate(source, (("eos_token", END),), (USER, ASSISTANT, END))


def render(source: str, messages: list[dict[str, Any]], **more: Any) -> tuple[str, list[str]]:
    text, answers = template_of(source).render({"messages": messages, **more}, "messages")
    assert answers is not None
    return text, [text[start:end] for start, end in answers]


@pytest.mark.parametrize("source", [TEMPLATE, CHATML, GENERATION, TOOLS])
def test_text_and_tokens_are_those_of_transformers(source: str, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    file = make_tokenizer(tmp_path, source)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    tools = [{"type": "function", "function": {"name": "add", "description": "a < b & c", "parameters": {}}}]
    more = {"tools": tools} if source == TOOLS else {}
    expected = theirs.apply_chat_template(TALK, tokenize=False, **more)
    assert render(source, TALK, **more)[0] == expected
    ours = open_tokenizer(str(file))
    document = open_chat_template(ours, file).render({"messages": TALK, **more}, "messages")
    (words,) = ours.encode_chats([document])
    marked = unpack_marks(words)
    assert marked.tokens.tolist() == theirs.apply_chat_template(TALK, return_dict=True, **more)["input_ids"]
    assert marked.ends.tolist() == [False] * (len(words) - 1) + [True]
    if source == GENERATION:
        masks = theirs.apply_chat_template(TALK, return_dict=True, return_assistant_tokens_mask=True)
        assert marked.counted.tolist() == [bool(mask) for mask in masks["assistant_masks"]]


def test_answers_are_what_a_model_has_to_write() -> None:
    assert render(TEMPLATE, TALK)[1] == [f"Two – “2”.{END}", f"\nNo{END}"]
    assert render(CHATML, TALK)[1] == [f"Two – “2”.{END}\n", f"No{END}\n"]
    assert render(GENERATION, TALK)[1] == [f"Two – “2”.{END}", f"No{END}"]


KEPT = "{{ message.content if message.role == 'user' or loop.last else '' }}"
FORGETFUL = TEMPLATE.replace("{{ message.content }}", KEPT)
"""As templates that keep the thoughts of the last answer alone."""
BAD = {
    "no answer": (TEMPLATE, TALK[:2], 'no message of role "assistant"'),
    "special token": (TEMPLATE, [*TALK[:2], {"role": "assistant", "content": f"a{END}"}], "read as a special token"),
    "no content": (TEMPLATE, [{"role": "user"}, TALK[2]], "without a `role` or a text as `content`"),
    "not a list": (TEMPLATE, "hello", "must list messages"),
    "changed later": (FORGETFUL, TALK, "depends on messages after it"),
    "no end": (TEMPLATE.replace("{{ eos_token }}", ""), TALK, "ends with no special token"),
    "refused": ("{{ raise_exception('roles must alternate') }}", TALK, "roles must alternate"),
    "unsafe": ("{{ messages.__class__.__mro__[1].__subclasses__() }}", TALK, "refused by the chat template"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_learned_from_is_refused(name: str) -> None:
    source, messages, why = BAD[name]
    with pytest.raises(ConversationError, match=why):
        template_of(source).render({"messages": messages}, "messages")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tokenizer, conversations, and shards of them in several files."""
    folder = tmp_path_factory.mktemp("chat")
    file = make_tokenizer(folder)
    make_conversations(folder / "talks.jsonl")
    tokenizer = open_tokenizer(str(file))
    template = open_chat_template(tokenizer, file)
    build_dataset(
        [str(folder / "talks.jsonl")],
        folder / "shards",
        tokenizer,
        field="messages",
        template=template,
        shard_tokens=1000,
    )
    return folder


def test_shards_hold_every_conversation_and_count_its_answers(built: Path) -> None:
    shards, tokenizer = TokenShards.open(built / "shards"), HuggingFaceTokenizer(built / "tokenizer.json")
    tokens, ends, counted = unpack_marks(shards.read_words(0, shards.tokens))
    assert (shards.read(0, shards.tokens) == tokens).all()
    talks = [json.loads(line)["messages"] for line in (built / "talks.jsonl").read_text().splitlines()]
    stops = np.flatnonzero(ends) + 1
    assert len(stops) == len(talks) == shards.index.documents
    for talk, start, stop in zip(talks, [0, *stops[:-1]], stops, strict=True):
        learned = tokenizer.decode(tokens[start:stop][counted[start:stop]])
        assert learned == "".join(f"{each['content']}{END}" for each in talk if each["role"] == "assistant")
    assert shards.index.counted == counted.sum() < shards.tokens
    assert shards.token_counts(0).sum() == shards.tokens
    shards.verify()


def test_a_flipped_mark_is_found_when_read(built: Path, tmp_path: Path) -> None:
    import shutil

    shutil.copytree(built / "shards", tmp_path / "shards")
    file = tmp_path / "shards" / "00000.bin"
    content = bytearray(file.read_bytes())
    content[40] ^= 1  # the lowest bit of a word is its loss mark
    file.write_bytes(content)
    with pytest.raises(SpecError, match="is corrupt"):
        TokenShards.open(tmp_path / "shards").read(0, 100)


def test_an_earlier_release_refuses_a_loss_mask_and_reads_text_as_ever(built: Path, tmp_path: Path) -> None:
    build_dataset(["python-stdlib"], tmp_path / "text", BytesTokenizer())
    text, chat = (json.loads((each / "index.json").read_text()) for each in (tmp_path / "text", built / "shards"))
    new = {"chat_template"}
    assert set(chat) - set(text) == new and chat["format"] == 2
    assert text["format"] == 1 and not {key for shard in text["shards"] for key in shard} & {"counted"}
    known = {name: (Any, ...) for name in DatasetIndex.model_fields if name not in new}
    earlier = create_model("Earlier", __base__=SpecModel, **known)  # type: ignore[call-overload]
    assert earlier.model_validate(text)
    with pytest.raises(ValueError, match="chat_template"):
        earlier.model_validate(chat)


def test_a_batch_counts_answers_and_nothing_else(built: Path) -> None:
    shards = TokenShards.open(built / "shards")
    batch = BatchConfig(sequences=8, length=32)
    data = ShuffledDataset(shards, batch.length, seed=0)
    loaded = BatchLoader(data, batch, 264, place_of(0), loss_mask=True).at(0)
    masked = BatchLoader(data, batch, 264, place_of(0), loss_mask=True, document_mask=True).at(0)
    tokens, ends, counted = unpack_marks(data.read_words(np.arange(8)))
    targets = loaded.targets.numpy()
    assert loaded.positions is None
    assert ((targets != IGNORE_INDEX) == counted[:, 1:]).all()
    assert (targets[counted[:, 1:]] == tokens[:, 1:][counted[:, 1:]]).all()
    assert loaded.counted == counted[:, 1:].sum()
    assert masked.positions is not None and masked.counted == (counted[:, 1:] & ~ends[:, :-1]).sum()


def test_the_command_builds_shows_and_appends(built: Path, tmp_path: Path) -> None:
    run = CliRunner()
    build = ["data", "build", str(built / "talks.jsonl"), "-o", str(tmp_path / "shards")]
    assert "MODEL/tokenizer.json" in str(run.invoke(app, [*build, "--chat"]).exception)
    refused = run.invoke(app, [*build, "--tokenizer", str(built / "tokenizer.json")])
    assert isinstance(refused.exception, SpecError) and "are built with --chat" in str(refused.exception)
    made = run.invoke(app, [*build, "--chat", "--tokenizer", str(built / "tokenizer.json")])
    assert made.exit_code == 0 and "tokens of answers" in made.output
    shown = run.invoke(app, ["data", "show", str(tmp_path / "shards")])
    assert "answers alone" in shown.output
    make_conversations(tmp_path / "more.jsonl", 7)
    append = ["data", "append", str(tmp_path / "more.jsonl"), "-o", str(tmp_path / "shards")]
    added = run.invoke(app, [*append, "--tokenizer", str(built / "tokenizer.json")])
    assert added.exit_code == 0 and "version 1" in added.output
    other = make_tokenizer(tmp_path / "other", CHATML)
    refused = run.invoke(app, [*append, "--tokenizer", str(other)])
    assert isinstance(refused.exception, SpecError) and "another chat template" in str(refused.exception)


def test_bad_lines_are_named_and_can_be_skipped(built: Path, tmp_path: Path) -> None:
    file = tmp_path / "talks.jsonl"
    good = json.dumps({"messages": TALK})
    file.write_text(f"{good}\n{json.dumps({'messages': TALK[:2]})}\n{good}\n")
    run = CliRunner()
    command = ["data", "build", str(file), "-o", str(tmp_path / "shards"), "--chat"]
    command += ["--tokenizer", str(built / "tokenizer.json")]
    refused = run.invoke(app, command)
    assert isinstance(refused.exception, SpecError) and "talks.jsonl:2: messages" in str(refused.exception)
    skipped = run.invoke(app, [*command, "--skip-bad"])
    assert skipped.exit_code == 0 and "skipped: 1 no answer" in skipped.output
