"""Builds on a real Ray: the bytes of a build here, over a kill of the build and the loss of a machine."""

import gzip
import hashlib
import importlib.util
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from danlu.storage.data.build import build_dataset
from danlu.storage.data.tokenizer import open_tokenizer

LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_USAGE_STATS_ENABLED": "0"}
SETTINGS = ["--shard-tokens", "50000", "--skip-bad"]


@pytest.fixture(scope="module")
def ray() -> None:
    if importlib.util.find_spec("ray") is None:
        pytest.skip("ray not installed (pip install 'danlu[data]')")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight million words in all kinds of files, a tokenizer, and what a build here makes of them."""
    root = tmp_path_factory.mktemp("ray")
    corpus = root / "corpus"
    corpus.mkdir()
    dice = random.Random(4)
    words = ["".join(dice.choices("abcdefgh", k=dice.randint(1, 9))) for _ in range(900)]

    def lines(count: int) -> str:
        texts = (" ".join(dice.choices(words, k=dice.randint(1, 300))) for _ in range(count))
        return "\n".join([*(json.dumps({"text": text}) for text in texts), "no JSON", ""])

    (corpus / "a.jsonl").write_text(lines(12000))
    (corpus / "b.jsonl.gz").write_bytes(gzip.compress(lines(3000).encode(), compresslevel=1))
    (corpus / "c.txt").write_text("a text of its own " * 50)
    (corpus / "d.jsonl").write_text(lines(9000))
    _tokenizer(root / "tokenizer.json", words)
    build_dataset(
        [str(corpus)], root / "here", open_tokenizer(str(root / "tokenizer.json")), shard_tokens=50000, skip_bad=True
    )
    return root


def _tokenizer(path: Path, words: list[str]) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    known = {word: number for number, word in enumerate(dict.fromkeys(["[UNK]", *words]))}
    tokenizer = Tokenizer(models.WordLevel(known, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["<|endoftext|>"])
    tokenizer.save(str(path))


def command(root: Path, out: Path, *more: str) -> list[str]:
    start = [sys.executable, "-c", "from danlu.cli import main; main()", "data", "build", str(root / "corpus")]
    return [*start, "-o", str(out), "--tokenizer", str(root / "tokenizer.json"), *SETTINGS, "--on", "ray", *more]


def run(root: Path, out: Path, *more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(root, out, *more), capture_output=True, text=True, timeout=540, cwd="/")


def hashes(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


def shards_noted(out: Path) -> int:
    journal = out / "build.journal"
    try:
        return len(json.loads(journal.read_text())["shards"])
    except FileNotFoundError:
        return 0


def await_shards(out: Path, number: int, build: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 450
    while shards_noted(out) < number:
        assert build.poll() is None, build.communicate()
        assert time.monotonic() < deadline, "no shard is noted"
        time.sleep(0.005)


@pytest.mark.full
@pytest.mark.usefixtures("ray")
def test_a_build_that_was_killed_goes_on_and_ends_with_the_bytes_of_one_here(root: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    killed = subprocess.Popen(command(root, out), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    await_shards(out, 2, killed)
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    noted = shards_noted(out)
    assert noted >= 2 and not (out / "index.json").exists(), "killed in the middle"
    shutil.copytree(out, tmp_path / "other")
    finished = run(root, out)
    assert finished.returncode == 0, finished.stderr
    assert f"({noted} shards reused from an interrupted build)" in finished.stdout
    assert "skipped: 3 bad JSON" in finished.stderr
    assert hashes(out) == hashes(root / "here")
    other = open_tokenizer(str(root / "tokenizer.json"))
    build_dataset([str(root / "corpus")], tmp_path / "other", other, shard_tokens=50000, skip_bad=True)
    assert hashes(tmp_path / "other") == hashes(root / "here"), "begun on Ray, ended here"


@pytest.fixture
def cluster(ray: None) -> Iterator[subprocess.Popen[str]]:
    script = Path(__file__).with_name("ray_cluster.py")
    process = subprocess.Popen(
        [sys.executable, str(script)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=os.environ | LOOPBACK,
    )
    try:
        yield process
    finally:
        process.communicate(timeout=180)  # the end of its input ends the cluster


def test_a_cluster_that_loses_a_machine_makes_the_same_bytes(
    cluster: subprocess.Popen[str], root: Path, tmp_path: Path
) -> None:
    assert cluster.stdin is not None and cluster.stdout is not None
    address = cluster.stdout.readline().strip()
    out = tmp_path / "out"
    building = subprocess.Popen(
        command(root, out, "--address", address), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd="/"
    )
    await_shards(out, 1, building)
    cluster.stdin.write("lose a node\n")
    cluster.stdin.flush()
    assert cluster.stdout.readline().strip() == "lost"
    assert building.poll() is None, "lost in the middle"
    said = building.communicate(timeout=540)
    assert building.returncode == 0, said
    assert hashes(out) == hashes(root / "here")


@pytest.mark.usefixtures("ray")
def test_what_is_wrong_is_told_as_here_and_nothing_stays(root: Path, tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text('{"text": "good"}\nno JSON\n')
    start = [sys.executable, "-c", "from danlu.cli import main; main()", "data", "build", str(tmp_path / "bad.jsonl")]
    before = set(Path("/tmp").glob("danlu-ray-*"))
    told = [
        subprocess.run([*start, "-o", str(tmp_path / "out"), *more], capture_output=True, text=True, timeout=540)
        for more in ([], ["--on", "ray"])
    ]
    assert told[0].returncode == told[1].returncode == 2
    assert told[1].stderr == told[0].stderr and "bad.jsonl:2: line: is not JSON" in told[0].stderr
    assert set(Path("/tmp").glob("danlu-ray-*")) == before
    nowhere = run(root, tmp_path / "none", "--address", "127.0.0.1:1")
    assert nowhere.returncode == 2 and "127.0.0.1:1" in nowhere.stderr and "cannot be reached" in nowhere.stderr
