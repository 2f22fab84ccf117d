"""Runs the commands of sample.md and hand-off.md in one empty folder and puts their real output below them.

python docs/how-to/make_sample.py            # writes the pages anew
python docs/how-to/make_sample.py --check    # says what differs, and fails if something does; not for seconds
"""

import json
from pathlib import Path

from page_outputs import main

PAGES = [Path(__file__).with_name(name) for name in ("sample.md", "hand-off.md")]
_NUMBERS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]


def prepare(folder: Path, page: str) -> None:
    """Sentences that a tiny model learns by heart in seconds, so that its text is the same on every machine."""
    lines = (
        f"After {_NUMBERS[at]} comes {_NUMBERS[at + 1]}, and then {_NUMBERS[at + 2]}."
        for at in (number % (len(_NUMBERS) - 2) for number in range(600))
    )
    (folder / "counting.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))


if __name__ == "__main__":
    main(PAGES, prepare)
