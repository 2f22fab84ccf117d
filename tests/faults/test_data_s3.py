"""Two ranks that train straight from a bucket: the samples of a folder, over a server that dies and comes back."""

import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from mixing import make_source, wait_for
from ranks import run_ranks
from s3_lab import BUCKET, KEY, SECRET, S3Lab

from danlu.storage.data.block_cache import MIN_CACHE_BYTES

s3fs = pytest.importorskip("s3fs", reason="the bucket is filled past our own client")
SECONDS_DEAD = 4.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two data sets of 15 and 23 blocks; the cache of the ranks holds eight."""
    folder = tmp_path_factory.mktemp("bucket")
    make_source(folder, "code", 500_000, 1)
    make_source(folder, "prose", 750_000, 2)
    return folder


@pytest.fixture(scope="module")
def told(folder: Path, s3: S3Lab) -> list[dict[str, Any]]:
    files = s3fs.S3FileSystem(endpoint_url=s3.endpoint, key=KEY, secret=SECRET, skip_instance_cache=True)
    for name in ("code", "prose"):
        for path in (folder / name).iterdir():
            files.pipe_file(f"{BUCKET}/sets/{name}/{path.name}", path.read_bytes())

    def kill_when_asked() -> None:
        wait_for(folder / "kill-back", 200)
        s3.kill()
        (folder / "killed-back").touch()
        time.sleep(SECONDS_DEAD)
        s3.start()
        (folder / "up-again").touch()
        wait_for(folder / "kill-gone", 200)
        s3.kill()
        (folder / "killed-gone").touch()

    with ThreadPoolExecutor(1) as pool:
        hand = pool.submit(kill_when_asked)
        run_ranks(Path(__file__).with_name("data_s3_rank.py"), 2, str(folder), s3.endpoint, seconds=900)
        hand.result()
    return [json.loads((folder / f"told-{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.full
def test_a_bucket_gives_the_samples_and_losses_of_a_folder(folder: Path, told: list[dict[str, Any]]) -> None:
    for rank in told:
        assert len(rank["folder"]["rows"]) == 10
        assert rank["bucket"] == rank["folder"], "samples, losses, and no warning"
    assert told[0]["folder"]["rows"] != told[1]["folder"]["rows"]
    held = sum(path.stat().st_size for path in (folder / "cache-bucket").iterdir())
    assert held <= MIN_CACHE_BYTES + 4096


@pytest.mark.full
def test_a_server_that_comes_back_is_waited_for_and_named(told: list[dict[str, Any]]) -> None:
    for rank in told:
        assert rank["back"]["rows"] == rank["folder"]["rows"]
        assert rank["back"]["losses"] == rank["folder"]["losses"], "to the last bit"
    said = [warning for rank in told for warning in rank["back"]["warnings"]]
    assert any(f"s3://{BUCKET}/sets/" in warning and "fails, retrying for" in warning for warning in said), said


@pytest.mark.full
def test_a_server_that_stays_dead_ends_the_run_with_its_name(told: list[dict[str, Any]]) -> None:
    said = [warning for rank in told for warning in rank["gone"]["warnings"]]
    assert len(said) == 2, "both ranks end"
    named = [text for text in said if f"s3://{BUCKET}/sets/" in text]
    assert named and all("did not answer for" in text and "resume the run" in text for text in named)
    assert all(text in named or "Connection closed by peer" in text for text in said), said
