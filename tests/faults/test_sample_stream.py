"""The stream of samples, by its hash, over kills, resumes, other numbers of ranks, a mixture, and an append in between.

The bulk goes through the code of a run in this process: at a kill all that is left is a checkpoint's cursor and what
is on disk. A few are real processes under a real SIGKILL.
"""

import hashlib
import json
import random
import signal
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from danlu.spec.recipe import DataConfig, DataSource
from danlu.storage.data.build import build_dataset
from danlu.storage.data.growing_shuffle import GrowingShuffle
from danlu.storage.data.mixture_dataset import MixtureDataset, update_version_log
from danlu.storage.data.mixture_sampler import MixtureSampler
from danlu.storage.data.token_shards import rank_sample_indices
from danlu.storage.data.tokenizer import BytesTokenizer
from danlu.storage.data.version_log import DatasetVersionLog

LENGTH, SEQUENCES, STEPS, SAVE_EVERY, SEED = 8, 12, 60, 4, 11
APPENDED_AFTER = 22  # steps; the run sees it at its next checkpoint
WORLDS = (1, 2, 3, 4, 6, 12)
KILL_POINTS = 520


def texts(path: Path, count: int, seed: int) -> str:
    dice = random.Random(seed)
    lines = [json.dumps({"text": "".join(dice.choices("abcdefgh", k=dice.randint(5, 80)))}) for _ in range(count)]
    path.write_text("\n".join(lines))
    return str(path)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("stream")
    for name, count in (("code", 60), ("prose", 90), ("late", 70)):
        texts(made / f"{name}.jsonl", count, count)
    for name in ("code", "prose"):
        build_dataset([str(made / f"{name}.jsonl")], made / name, BytesTokenizer(), shard_tokens=700)
    return made


def mixture_of(root: Path) -> MixtureDataset:
    weights = {"code": 0.3, "prose": 0.7}
    sources = tuple(DataSource(shards=str(root / name), weight=weight) for name, weight in weights.items())
    return MixtureDataset.from_recipe(DataConfig(sources=sources), LENGTH, SEED)


class Life:
    """A run as its data sees it: one that dies leaves a cursor and a folder."""

    def __init__(self, root: Path, run: Path) -> None:
        self.root, self.log = root, DatasetVersionLog(run / "data.jsonl")
        self.saved = 0
        self.rows: dict[int, bytes] = {}
        """Hash of the batch of each step, the last time it was taken."""

    def live(self, until: int, world: int, append_after: int | None = None) -> None:
        """Go on from the newest checkpoint at `world` ranks, and die after step `until`."""
        data = mixture_of(self.root)
        step = self.saved
        data.set_version_schedule(update_version_log(self.log, data, step * SEQUENCES))
        while step < until:
            cursor = step * SEQUENCES
            parts = [data.read_samples(rank_sample_indices(cursor, SEQUENCES, rank, world)) for rank in range(world)]
            self.rows[step] = hashlib.sha256(np.concatenate(parts).tobytes()).digest()
            step += 1
            if step == append_after:
                build_dataset([str(self.root / "late.jsonl")], self.root / "code", BytesTokenizer(), append=True)
            if step % SAVE_EVERY == 0:
                self.saved = step
                data.set_version_schedule(update_version_log(self.log, data, step * SEQUENCES))

    def stream(self) -> str:
        return hashlib.sha256(b"".join(self.rows[step] for step in range(STEPS))).hexdigest()


@pytest.fixture(scope="module")
def undisturbed(root: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, bytes]:
    """The hash of the stream, and the promises, of a run that nobody kills; the append is there from then on."""
    run = tmp_path_factory.mktemp("run")
    life = Life(root, run)
    life.live(STEPS, world=1, append_after=APPENDED_AFTER)
    assert [promise.cursor for promise in life.log.read()] == [0, 24 * SEQUENCES], "taken up at the checkpoint after it"
    return life.stream(), (run / "data.jsonl").read_bytes()


def test_the_stream_is_the_same_over_kills_and_other_worlds(
    root: Path, tmp_path: Path, undisturbed: tuple[str, bytes]
) -> None:
    """Kill points by the hundred: a run is killed and resumed twenty times, each time at another number of ranks."""
    expected, promises = undisturbed
    dice = random.Random(5)
    kills = lives = 0
    while kills < KILL_POINTS:
        run = tmp_path / str(lives)
        run.mkdir()
        (run / "data.jsonl").write_bytes(promises)
        life = Life(root, run)
        for until in (*sorted(dice.sample(range(1, STEPS), k=20)), STEPS):
            life.live(until, dice.choice(WORLDS))
            kills += until < STEPS
        assert life.stream() == expected
        assert (run / "data.jsonl").read_bytes() == promises, "nothing new was promised"
        lives += 1
    print(f"{kills} kills over {lives} runs: one stream, {expected[:16]}")


def test_an_append_between_a_kill_and_its_resume_repeats_and_skips_nothing(root: Path, tmp_path: Path) -> None:
    """Killed before, at and after the checkpoint at which it is seen: what was promised stays, the rest grows."""
    for number, killed in enumerate((23, 24, 25)):
        own = tmp_path / f"data-{number}"
        own.mkdir()
        for name in ("code", "prose", "late"):
            (own / f"{name}.jsonl").write_bytes((root / f"{name}.jsonl").read_bytes())
        for name in ("code", "prose"):
            build_dataset([str(own / f"{name}.jsonl")], own / name, BytesTokenizer(), shard_tokens=700)
        run = tmp_path / f"run-{number}"
        run.mkdir()
        life = Life(own, run)
        life.live(killed, world=2, append_after=APPENDED_AFTER)
        before = dict(life.rows)
        life.live(STEPS, world=3)
        kept = [promise.cursor // SEQUENCES for promise in life.log.read()][1]
        assert kept == (20 if killed == 23 else 24)
        assert all(life.rows[step] == row for step, row in before.items() if step < kept or kept == 24)
        _each_sample_once(own, life)


def _each_sample_once(root: Path, life: Life) -> None:
    data = mixture_of(root)
    data.set_version_schedule([(promise.cursor, promise.editions) for promise in life.log.read()])
    places = data.locate(np.arange(STEPS * SEQUENCES * 6))
    for source in (0, 1):
        epochs: dict[int, list[int]] = {}
        for place in places:
            if place.source == source:
                epochs.setdefault(data.epoch_of(source, place.source_index), []).append(place.sample_id)
        last = max(epochs)
        assert last >= 1
        for epoch, numbers in epochs.items():
            assert len(set(numbers)) == len(numbers)
            assert epoch == last or sorted(numbers) == list(range(len(numbers)))


def test_ten_thousand_million_samples_are_in_no_list() -> None:
    """At 10^10 a sample costs what it costs at 10^3, in time and in memory; a mixture with an append in the middle."""
    mixture = MixtureSampler((7, 2, 1), seed=1)
    orders = [GrowingShuffle([(0, 9 * 10**9), (50, 10**10)], seed) for seed in range(3)]

    def seconds(cursor: int) -> float:
        began = time.perf_counter()
        sources, numbers = mixture.locate(np.arange(cursor, cursor + 4096))
        for source, order in enumerate(orders):
            order.sample_ids(numbers[sources == source])
        return time.perf_counter() - began

    seconds(0)
    near, far = (min(seconds(cursor) for _ in range(20)) for cursor in (10**3, 10**10))
    tracemalloc.start()
    seconds(10**10)
    held = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    print(f"4,096 samples from 10^3: {near * 1e3:.2f} ms, from 10^10: {far * 1e3:.2f} ms, ratio {far / near:.2f}")
    assert far < 5 * near and held < 8 << 20


PROCESS = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from test_sample_stream import SAVE_EVERY, STEPS, Life
root, run, world = Path(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4])
life, saved, out = Life(root, run), run / "saved", run / "rows"
life.saved = int(saved.read_text()) if saved.exists() else 0
while life.saved < STEPS:
    life.live(life.saved + SAVE_EVERY, world)
    with out.open("a") as rows:
        for step in range(life.saved - SAVE_EVERY, life.saved):
            rows.write(f"{step} {life.rows[step].hex()}\\n")
    new = run / "saved.new"
    new.write_text(str(life.saved))
    new.rename(saved)
"""


def test_real_processes_under_a_real_kill(root: Path, tmp_path: Path, undisturbed: tuple[str, bytes]) -> None:
    expected, promises = undisturbed
    (tmp_path / "data.jsonl").write_bytes(promises)
    command = [sys.executable, "-c", PROCESS, str(Path(__file__).parent), str(root), str(tmp_path)]
    dice, kills = random.Random(2), 0
    for world in (2, 3, 12, 4):
        process = subprocess.Popen([*command, str(world)])
        began = (tmp_path / "rows").stat().st_size if (tmp_path / "rows").exists() else 0
        while process.poll() is None and kills < 3:
            if (tmp_path / "rows").exists() and (tmp_path / "rows").stat().st_size > began:
                time.sleep(dice.uniform(0, 0.05))
                process.send_signal(signal.SIGKILL)
                kills += process.wait() == -signal.SIGKILL
                break
            time.sleep(0.002)
        else:
            assert process.wait(timeout=360) == 0
    rows = {}
    for line in (tmp_path / "rows").read_text().splitlines():
        step, row = line.split()
        assert rows.setdefault(int(step), row) == row, "a step taken again reads what it read before"
    stream = hashlib.sha256(b"".join(bytes.fromhex(rows[step]) for step in range(STEPS))).hexdigest()
    assert stream == expected and kills >= 2
