"""Feed a million invalid manifests, nodes and leaves to the reader: are they refused, and only refused?

    python benchmarks/ckpt_fuzz.py [--inputs 1000000] [--engine atheris|random] [--report FILE] [--corpus DIR] [--more]

`atheris` (`pip install danlu[fuzz]`) searches for inputs that reach new lines of the reader; `random` draws them at
random. Both mutate valid texts with knowledge of the format and recompute the hashes above them. The reader may raise
`CorruptCheckpointError` and nothing else, open no path outside its folder, use no more than 512 MiB, and no input may
take longer than two seconds of CPU time. Exits non-zero otherwise. The last line is JSON. With `--more` the figures are
added to those in FILE, so that a campaign can be split; give each part another `--seed` and all the same `--corpus`.
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

from reports import add_report_option, write_report
from rich.console import Console
from rich.progress import Progress

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "faults"))

import fuzzing


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    options.add_argument("--inputs", type=int, default=1_000_000)
    options.add_argument("--engine", choices=("atheris", "random"), default="atheris")
    options.add_argument("--seed", type=int, default=1)
    add_report_option(options)
    options.add_argument("--corpus", type=Path, help="where atheris keeps inputs that reach something new")
    options.add_argument("--more", action="store_true", help="add to the report that is there")
    asked = options.parse_args()
    shared = Path("/dev/shm")
    with tempfile.TemporaryDirectory(prefix="danlu-fuzz-", dir=shared if shared.is_dir() else None) as work:
        told = _watched(Path(work), asked)
    bad = bool(told["other"] or told["outside"]) or told["slowest"] > fuzzing.LONGEST or told["inputs"] < asked.inputs
    engines = {asked.engine: told}
    if asked.more and asked.report and asked.report.exists():
        engines = _added(json.loads(asked.report.read_text(encoding="utf-8"))["figures"]["engines"], told)
    summed = {key: sum(each[key] for each in engines.values()) for key in ("inputs", "outside")}
    other = sum(len(each["other"]) for each in engines.values())
    write_report(asked.report, "ckpt_fuzz", {**summed, "other": other, "engines": list(engines.values())})
    print(json.dumps(told))
    return int(bad)


def _added(before: list[dict[str, Any]], told: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The earlier figures by engine, with those of this engine added."""
    engines = {each["engine"]: each for each in before}
    if earlier := engines.get(told["engine"]):
        counted = {key: earlier[key] + told[key] for key in ("inputs", "accepted", "refused", "outside", "seconds")}
        worst = max(earlier["slowest"], told["slowest"])
        told = {**told, **counted, "slowest": worst, "other": earlier["other"] | told["other"]}
    return engines | {told["engine"]: told}


def _watched(work: Path, asked: argparse.Namespace) -> dict[str, Any]:
    """Run the fuzzer in a separate process with limited memory, and show its progress."""
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
