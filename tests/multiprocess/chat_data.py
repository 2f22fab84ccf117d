"""A small tokenizer with a chat template, as a Hugging Face folder has them, and conversations for it."""

import json
import random
from pathlib import Path

USER, ASSISTANT, END = "<|user|>", "<|assistant|>", "<|endoftext|>"
TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}"
    "{% if message.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def make_tokenizer(folder: Path, template: str = TEMPLATE) -> Path:
    """Bytes as tokens and three special ones, 259 in all: the path of its tokenizer.json."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    folder.mkdir(parents=True, exist_ok=True)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([USER, ASSISTANT, END])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"eos_token": END, "chat_template": template, "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder / "tokenizer.json"


def make_conversations(file: Path, number: int = 200) -> None:
    """Conversations of one to three questions and answers, as JSON lines."""
    words = random.Random(3)

    def text() -> str:
        return "".join(words.choices("abcdefgh ", k=words.choice((1, 2, 5, 9, 14))))

    lines = []
    for _ in range(number):
        turns = [(text(), text()) for _ in range(words.choice((1, 1, 2, 3)))]
        pairs = [zip(("user", "assistant"), turn, strict=True) for turn in turns]
        messages = [{"role": role, "content": content} for pair in pairs for role, content in pair]
        lines.append(json.dumps({"messages": messages}) + "\n")
    file.write_text("".join(lines))
