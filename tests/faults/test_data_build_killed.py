"""A build that is killed at any write, once or twice, and started again ends with the bytes of one that was not.

A killed process leaves the page cache as it is, so that these say nothing about what is brought to the disk: crashes of
the machine are in `test_data_crashes.py`.
"""

import gzip
import json
import os
import random
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from danlu.spec import SpecError
from danlu.storage.data import build as builder
from danlu.storage.data.build import build_dataset
from danlu.storage.data.token_shards import TokenShards
from danlu.storage.data.tokenizer import BytesTokenizer

BYTES = BytesTokenizer()
SHARD_TOKENS = 150
Make = Callable[[Path], None]


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Lines, packed lines, whole files, and a few bad lines that are left out and counted."""
    root = tmp_path_factory.mktemp("texts")
    dice = random.Random(1)

    def lines(count: int) -> str:
        made = [json.dumps({"text": "".join(dice.choices("abcdef", k=dice.randint(0, 90)))}) for _ in range(count)]
        made.insert(count // 2, '{"text": 7}')
        return "\n".join(made)

    (root / "a.jsonl").write_text(lines(9))
    (root / "b.jsonl.gz").write_bytes(gzip.compress(lines(9).encode(), mtime=0))
    (root / "c.txt").write_text("one document of a file " * 12)
    (root / "d.jsonl").write_text(lines(4))
    return root


def fresh(texts: Path) -> Make:
    return lambda out: _build(texts, out)


def forced(texts: Path) -> Make:
    return lambda out: _build(texts, out, force=True)


def appended(texts: Path) -> Make:
    return lambda out: _build(texts, out, append=True)


def _build(texts: Path, out: Path, *, force: bool = False, append: bool = False) -> None:
    build_dataset([str(texts)], out, BYTES, shard_tokens=SHARD_TOKENS, skip_bad=True, force=force, append=append)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def killed_at(point: int, make: Make, out: Path) -> bool:
    """Run a build in a process of its own that is killed at its `point`-th touch of the disk; whether it came to it."""
    child = os.fork()
    if child == 0:
        failed = True
        try:
            _die_at(point)
            make(out)
            failed = False
        except SpecError as error:  # a second build of a data set that is whole is refused
            failed = "already holds a data set" not in str(error)
        finally:  # never back into the tests of the process this was forked from
            os._exit(int(failed))
    _, status = os.waitpid(child, 0)
    assert status == 0 or os.WIFSIGNALED(status)
    return status != 0


def _die_at(point: int) -> None:
    """Before the `point`-th sync, rename, removal or opening of a file, be killed."""
    left = [point]

    def counted(call: Callable[..., object]) -> Callable[..., object]:
        def touch(*arguments: object, **named: object) -> object:
            left[0] -= 1
            if left[0] < 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*arguments, **named)

        return touch

    for name in ("rename", "unlink", "write_bytes", "open"):
        setattr(Path, name, counted(getattr(Path, name)))
    os.fsync = counted(os.fsync)  # type: ignore[assignment]


def prepared(kind: str, texts: Path, out: Path) -> None:
    """What is there before the build: nothing, or a data set of another text."""
    if kind != "fresh":
        build_dataset([str(texts / "c.txt")], out, BYTES, shard_tokens=SHARD_TOKENS)


@pytest.mark.parametrize("kind", [pytest.param("fresh", marks=pytest.mark.full), "forced", "appended"])
def test_killed_at_every_touch_of_the_disk(
    kind: str, texts: Path, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        builder, "_PROGRESS_OVERHEAD_DIVISOR", 0
    )  # a note a shard, so that every state there is can be met
    make = {"fresh": fresh, "forced": forced, "appended": appended}[kind](texts)
    before = memory / "before"
    prepared(kind, texts, before)
    whole = memory / "whole"
    if before.exists():
        shutil.copytree(before, whole)
    make(whole)
    expected = contents(whole)
    points = 0
    dice = random.Random(kind)
    while True:
        out = memory / f"{kind}-{points}"
        if before.exists():
            shutil.copytree(before, out)
        if not killed_at(points, make, out):
            break
        if (out / "index.json").exists():
            TokenShards.open(out).verify()  # the old or the new, and all of it
        killed_at(dice.randint(0, 60), make, out)  # a second fault, in the recovery from the first
        if kind == "fresh" and (out / "index.json").exists():
            _build(texts, out, force=True)  # it is whole; without force that is what a build says
        else:
            make(out)
        assert contents(out) == expected, f"killed at touch {points}"
        shutil.rmtree(out)
        points += 1
    assert points > 60


def test_what_was_done_is_not_done_again(texts: Path, memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builder, "_PROGRESS_OVERHEAD_DIVISOR", 0)
    out, notes = memory / "out", list[str]()
    assert killed_at(45, fresh(texts), out)
    done = json.loads((out / "build.journal").read_text())["shards"]
    assert len(done) >= 2
    built = build_dataset([str(texts)], out, BYTES, shard_tokens=SHARD_TOKENS, skip_bad=True, on_note=notes.append)
    assert built.resumed_shards == len(done) and not notes
    assert built.skipped["not a text"] == 3, "those before the break are counted too"


def test_changed_sources_begin_anew_and_say_so(texts: Path, memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builder, "_PROGRESS_OVERHEAD_DIVISOR", 0)
    own, out, notes = shutil.copytree(texts, memory / "texts"), memory / "out", list[str]()
    assert killed_at(45, fresh(own), out)
    (own / "a.jsonl").write_text('{"text": "another"}\n')
    built = build_dataset([str(own)], out, BYTES, shard_tokens=SHARD_TOKENS, skip_bad=True, on_note=notes.append)
    assert built.resumed_shards == 0 and "shards of an interrupted build: it had other sources" in notes[0]
    build_dataset([str(own)], memory / "whole", BYTES, shard_tokens=SHARD_TOKENS, skip_bad=True)
    assert contents(out) == contents(memory / "whole")
