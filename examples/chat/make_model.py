"""Make a small random chat model in the format of Hugging Face, and conversations to teach it something.

    python make_model.py        # writes small-chat/ and talks.jsonl

Stands for what you have: a published model with its tokenizer and chat template, and your own conversations.
"""

import json
import random
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

FOLDER, TALKS = Path("small-chat"), Path("talks.jsonl")
CAPITALS = {
    "France": "Paris",
    "Italy": "Rome",
    "Japan": "Tokyo",
    "Egypt": "Cairo",
    "Peru": "Lima",
    "Kenya": "Nairobi",
    "Norway": "Oslo",
    "Cuba": "Havana",
}
QUESTIONS = ("What is the capital of {}?", "Which city is the capital of {}?", "Name the capital of {}.")
TEMPLATE = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


def make_talks() -> list[dict[str, object]]:
    """Conversations of one or two questions about capitals, each with its answer."""
    choose = random.Random(0)
    talks: list[dict[str, object]] = []
    for _ in range(600):
        messages = []
        for country in choose.sample(sorted(CAPITALS), choose.choice((1, 2))):
            messages.append({"role": "user", "content": choose.choice(QUESTIONS).format(country)})
            messages.append({"role": "assistant", "content": f"It is {CAPITALS[country]}."})
        talks.append({"messages": messages})
    return talks


def make_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of these texts, with the special tokens of its chat template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    made.chat_template = TEMPLATE
    return made


def main() -> None:
    """Write both."""
    talks = make_talks()
    TALKS.write_text("".join(json.dumps(talk) + "\n" for talk in talks))
    texts = [message["content"] for talk in talks for message in talk["messages"]]  # type: ignore[attr-defined]
    tokenizer = make_tokenizer(texts)
    tokenizer.save_pretrained(FOLDER)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=320,
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=256,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    Qwen3ForCausalLM(config).save_pretrained(FOLDER)
    print(f"{FOLDER}: {len(tokenizer)} tokens; {TALKS}: {len(talks)} conversations")


if __name__ == "__main__":
    main()
