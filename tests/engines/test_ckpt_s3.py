"""Checkpoints copied to a real S3 server and back, by the commands a user gives."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from danlu.storage.checkpoint.single_writer import source_tensor, write_checkpoint
from danlu.storage.data.build import build_dataset
from danlu.storage.data.tokenizer import BytesTokenizer
from danlu.storage.store.base import open_store

KEYS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "testtest", "AWS_DEFAULT_REGION": "us-east-1"}
IDENTITY = (
    '{"identities": [{"name": "test", "credentials": [{"accessKey": "test", "secretKey": "testtest"}],'
    ' "actions": ["Admin", "Read", "Write", "List", "Tagging"]}]}'
)


def free_ports(count: int) -> list[int]:
    """Ports nobody listens on; the server takes each of them plus 10,000 as well."""
    held = [socket.socket() for _ in range(count)]
    for number, each in enumerate(held):
        each.bind(("127.0.0.1", 20_000 + os.getpid() % 1000 * 10 + number))
    ports = [each.getsockname()[1] for each in held]
    for each in held:
        each.close()
    return ports


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in KEYS.items():
            patch.setenv(name, value)
        yield from _served(tmp_path_factory.mktemp("s3"))


def _served(tmp_path: Path) -> Iterator[str]:
    (tmp_path / "identity.json").write_text(IDENTITY)
    (tmp_path / "data").mkdir()
    master, volume, filer, s3 = free_ports(4)
    command = [str(Path(sys.executable).with_name("weed")), "server", "-ip=127.0.0.1", "-ip.bind=127.0.0.1"]
    command += [f"-dir={tmp_path / 'data'}", f"-master.port={master}", f"-volume.port={volume}", "-filer", "-s3"]
    command += [f"-filer.port={filer}", f"-s3.port={s3}", f"-s3.config={tmp_path / 'identity.json'}"]
    command += ["-master.volumeSizeLimitMB=64"]
    with (tmp_path / "log").open("wb") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        yield _with_bucket(f"http://127.0.0.1:{s3}", tmp_path / "log")
    finally:
        server.terminate()
        server.wait(30)


def _with_bucket(endpoint: str, log: Path) -> str:
    make = f"import s3fs; s3fs.S3FileSystem(endpoint_url={endpoint!r}).call_s3('create_bucket', Bucket='demo')"
    deadline = time.monotonic() + 270
    while (tried := subprocess.run([sys.executable, "-c", make], capture_output=True, text=True)).returncode:
        assert time.monotonic() < deadline, tried.stderr[-2000:] + log.read_text()[-2000:]
        time.sleep(1)
    return endpoint


def danlu(*arguments: str, group: str = "ckpt", folder: Path | None = None) -> str:
    words = [group, *arguments] if group else [*arguments]
    command = [sys.executable, "-W", "error::ResourceWarning", "-m", "danlu", *words]
    result = subprocess.run(command, capture_output=True, text=True, timeout=540, cwd=folder)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def test_to_a_bucket_and_back(tmp_path: Path, endpoint: str) -> None:
    numbers = np.random.default_rng(0).random((512, 300)).astype(np.float32)
    for step in (4, 8):
        write_checkpoint(open_store(str(tmp_path / "from")), step, [source_tensor("w", "F32", numbers + step)], {})
    settings = ["--s3", f"endpoint={endpoint}"]
    assert danlu("copy", str(tmp_path / "from"), "s3://demo/kept", *settings).count("every chunk verified") == 2
    assert "already there" in danlu("copy", f"{tmp_path / 'from'}@4", "s3://demo/kept", *settings)
    assert danlu("verify", "s3://demo/kept", "--all", *settings).count(": intact: 1 tensors") == 2
    danlu("copy", "s3://demo/kept@8", str(tmp_path / "back"), *settings)
    assert "1 of 1 shared tensors" in danlu("diff", f"{tmp_path / 'from'}@8", str(tmp_path / "back"))
    danlu("rm", "s3://demo/kept@4", "--yes", *settings)
    assert [line.split()[0] for line in danlu("ls", "s3://demo/kept", *settings).splitlines()] == ["step", "8"]


RECIPE = """
name = "away"
steps = {steps}
model = {{ base = "tiny-llama", vocabulary = 264 }}
data.shards = "shards"
batch = {{ sequences = 8, length = 64 }}
schedule.kind = "constant"

[checkpoint]
every = 2
keep = 1
parity = 1
store = "s3://demo/runs"
options = {{ endpoint = "{endpoint}" }}
"""


@pytest.mark.full
def test_a_run_whose_checkpoints_are_in_a_bucket(tmp_path: Path, endpoint: str) -> None:
    """It trains, resumes on another layout, and all commands find its checkpoints by the run's name."""
    (tmp_path / "text.txt").write_text(Path(__file__).read_text() * 8)
    build_dataset([str(tmp_path / "text.txt")], tmp_path / "shards", BytesTokenizer())
    (tmp_path / "away.toml").write_text(RECIPE.format(steps=5, endpoint=endpoint))
    danlu("train", "away.toml", "--nproc", "2", "--name", "mine", group="", folder=tmp_path)
    assert not (tmp_path / "runs" / "mine" / "checkpoints").exists()
    listed = danlu("ls", "mine", folder=tmp_path).splitlines()
    assert [line.split()[:2] for line in listed[1:]] == [["5", "complete"]], "read back whole, so the older went"
    store = open_store("s3://demo/runs/mine", {"endpoint": endpoint})
    pack = next(name for name in store.list("step-00000005") if name.endswith("-000001.pack"))
    store.remove(f"step-00000005/{pack}")
    recipe = tmp_path / "runs" / "mine" / "recipe.toml"
    recipe.write_text(recipe.read_text().replace("steps = 5\n", "steps = 7\n", 1))
    told = danlu("resume", "mine", "--nproc", "1", group="", folder=tmp_path)
    assert "0 repeated, 0 skipped" in told, told
    assert "intact" in danlu("verify", "mine@7", folder=tmp_path)
    events = (tmp_path / "runs" / "mine" / "events.jsonl").read_text()
    assert "reconstructed from parity" in events
