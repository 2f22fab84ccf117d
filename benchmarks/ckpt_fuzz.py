"""Feed a million manifests, nodes and leaves that nobody wrote to the reader: are they refused, and only refused?

    python benchmarks/ckpt_fuzz.py [--inputs 1000000] [--engine atheris|random] [--json FILE] [--corpus DIR] [--more]

`atheris` (`pip install danlu[fuzz]`) looks for inputs that reach new lines of the reader; `random` draws them by lot.
Both change valid texts with knowledge of the format and make the hashes above them right again. The reader may raise
`Damaged` and nothing else, open no path outside its folder, take no more than 512 MiB, and no input may take longer
than two seconds of processor time. Exits non-zero otherwise. The last line is JSON. With `--more` the figures are added
to those in FILE, so that a campaign can be cut into pieces; give each another `--seed` and all the same `--corpus`.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "faults"))

import fuzzing


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    options.add_argument("--inputs", type=int, default=1_000_000)
    options.add_argument("--engine", choices=("atheris", "random"), default="atheris")
    options.add_argument("--seed", type=int, default=1)
    options.add_argument("--json", type=Path, help="keep the report here")
    options.add_argument("--corpus", type=Path, help="where atheris keeps inputs that reach something new")
    options.add_argument("--more", action="store_true", help="add to the report that is there")
    asked = options.parse_args()
    shared = Path("/dev/shm")
    with tempfile.TemporaryDirectory(prefix="danlu-fuzz-", dir=shared if shared.is_dir() else None) as work:
        told = _watched(Path(work), asked)
    bad = bool(told["other"] or told["outside"]) or told["slowest"] > fuzzing.LONGEST or told["inputs"] < asked.inputs
    if asked.more and asked.json and asked.json.exists():
        told = _added(json.loads(asked.json.read_text(encoding="utf-8")), told)
    if asked.json:
        asked.json.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(told))
    return int(bad)


def _added(before: dict[str, Any], told: dict[str, Any]) -> dict[str, Any]:
    """Two reports as one."""
    if before["engine"] != told["engine"]:
        raise SystemExit(f"the report that is there is of {before['engine']}, but this one of {told['engine']}")
    summed = {key: before[key] + told[key] for key in ("inputs", "accepted", "refused", "outside", "seconds")}
    return {
        **told,
        **summed,
        "slowest": max(before["slowest"], told["slowest"]),
        "other": before["other"] | told["other"],
    }


def _watched(work: Path, asked: argparse.Namespace) -> dict[str, Any]:
    """Run the fuzzer in a process of its own, whose memory is bounded, and follow what it has done."""
    began, told = time.perf_counter(), asdict(fuzzing.Fuzzed())
    command = [sys.executable, str(Path(fuzzing.__file__).with_name("fuzz_process.py")), str(work), asked.engine]
    command += [str(asked.inputs), str(asked.seed), *([str(asked.corpus)] if asked.corpus else [])]
    log = work / "log"
    with log.open("wb") as output, Progress(console=Console(stderr=True)) as progress:
        task = progress.add_task(f"inputs ({asked.engine})", total=asked.inputs)
        process = subprocess.Popen(command, stdout=output, stderr=output)
        while process.poll() is None:
            time.sleep(0.5)
            if (work / "told").exists():
                told = json.loads((work / "told").read_text(encoding="utf-8"))
                progress.update(task, completed=told["inputs"])
    told = json.loads((work / "told").read_text(encoding="utf-8")) if (work / "told").exists() else told
    if told["inputs"] < asked.inputs:
        print(log.read_text(encoding="utf-8", errors="replace")[-4000:], file=sys.stderr)
    seconds = round(time.perf_counter() - began, 1)
    return {**told, "engine": asked.engine, "seconds": seconds, "exit": process.returncode}


if __name__ == "__main__":
    sys.exit(main())
