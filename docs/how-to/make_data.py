"""Runs the commands of data.md in an empty folder and puts their real output below them.

python docs/how-to/make_data.py            # writes the page anew
python docs/how-to/make_data.py --check    # says what differs, and fails if something does; not for seconds
"""

import json
import re
from pathlib import Path

from page_outputs import main

PAGE = Path(__file__).with_name("data.md")
_RECIPE = re.compile(r"```toml\n(?P<text>.*?)```", re.DOTALL)
_HEAD = """\
name = "mixed"
steps = 100
seed = 5

[model]
base = "tiny-llama"
vocabulary = 264

[batch]
sequences = 4
length = 64

"""


def prepare(folder: Path, page: str) -> None:
    """Three small files of text, and the recipe that the page speaks of."""
    texts = {
        "code": [f"def times_{number}(x):\n    return x * {number}\n" for number in range(300)],
        "prose": [f"The furnace was opened for the {number}th time, and the elixir was not yet done. " * 3
                  for number in range(300)],
        "late": [f"def plus_{number}(x):\n    return x + {number}\n" for number in range(100)],
    }  # fmt: skip
    for name, documents in texts.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    recipe = _RECIPE.search(page)
    assert recipe is not None
    (folder / "mixed.toml").write_text(_HEAD + recipe["text"])


if __name__ == "__main__":
    main([PAGE], prepare)
