"""Bad files given to commands in a process of their own, and what must hold for each of them."""

import json
import os
import re
import selectors
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bad_files import CASES, Case
from hypothesis import HealthCheck, Phase, given, seed, settings

SECONDS = 2.0
"""Of processor time, so that a machine with other work does not change the answer."""
MEMORY = 1 << 30
HOPELESS = 60.0
"""Seconds of processor time after which a case is not waited for."""
STILL = 30
"""Seconds by the clock in which a case that waits for something takes no processor time at all."""
_OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
_REMEDY = re.compile(r"→|\"suggestion\": \"\w|\bmust\b|--\w|Usage:|\btry\b|There are no|danlu \w+")


@dataclass
class Report:
    """What a campaign found so far."""

    cases: int = 0
    accepted: int = 0
    refused: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    slowest: float = 0.0
    slowest_case: str = ""
    memory: int = 0
    memory_case: str = ""
    restarts: int = 0
    faults: list[dict[str, Any]] = field(default_factory=list)

    def add(self, case: Case, answer: dict[str, Any], wrong: list[str]) -> None:
        """Count one case."""
        self.cases += 1
        self.kinds[case.kind] += 1
        self.accepted += answer["code"] == 0
        self.refused += answer["code"] in (1, 2)
        told = f"{case.kind}: danlu {' '.join(case.command)}"
        if answer["seconds"] > self.slowest:
            self.slowest, self.slowest_case = answer["seconds"], told
        if answer["memory"] > self.memory:
            self.memory, self.memory_case = answer["memory"], told
        if wrong:
            said = {key: answer[key] for key in ("code", "said", "raised", "outside", "seconds", "memory")}
            said["said"] = said["said"][-1500:]
            self.faults.append({"wrong": wrong, "case": told, **said})


class Bench:
    """A folder with a guard beside the case, and the worker that runs it; started again when it dies."""

    def __init__(self, work: Path) -> None:
        self.work = work.resolve()
        self.guard = self.work / "guard"
        (self.guard / "inner").mkdir(parents=True)
        (self.guard / "kept").write_text("name = 'kept'\n", encoding="utf-8")
        self.before = self._guarded()
        self.worker: subprocess.Popen[str] | None = None
        self.count = 0

    def run(self, case: Case, report: Report) -> Path:
        """Write the files, run the command, and judge what happened; the folder it ran in, which is removed if well."""
        folder = self.work / f"case-{self.count}"
        self.count += 1
        folder.mkdir()
        for file in case.files:
            file.write(folder)
        answer = self._answer({"folder": str(folder), "command": list(case.command)}, report)
        wrong = [*_wrong(case, answer), *self._touched(folder)]
        report.add(case, answer, wrong)
        if wrong:
            report.faults[-1]["folder"] = str(folder)
        else:
            shutil.rmtree(folder)
        return folder

    def close(self) -> None:
        """End the worker."""
        if self.worker is not None:
            self.worker.kill()
            with self.worker:  # closes its pipes, and waits
                pass
            self.worker = None

    def _started(self) -> "subprocess.Popen[str]":
        if self.worker is None or self.worker.poll() is not None:
            environment = os.environ | {"PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
            environment |= {"HOME": str(self.work), "TORCHINDUCTOR_CACHE_DIR": str(self.work / "cache")}
            script = Path(__file__).with_name("bad_input_worker.py")
            self.close()
            with (self.work / "worker.log").open("a") as log:
                self.worker = subprocess.Popen(
                    [sys.executable, str(script)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    text=True,
                    env=environment,
                )
            assert self._line(self.worker) == "ready\n", (self.work / "worker.log").read_text(errors="replace")
        return self.worker

    def _answer(self, asked: dict[str, Any], report: Report) -> dict[str, Any]:
        worker = self._started()
        assert worker.stdin and worker.stdout
        worker.stdin.write(json.dumps(asked) + "\n")
        worker.stdin.flush()
        line = self._line(worker)
        if line:
            answer: dict[str, Any] = json.loads(line)
            return answer
        self.close()
        report.restarts += 1
        log = (self.work / "worker.log").read_text(errors="replace")[-1500:]
        raised = f"the process hung or died:\n{log}"
        return {"code": -1, "said": "", "raised": raised, "outside": [], "seconds": 0.0, "memory": 0}

    def _line(self, worker: "subprocess.Popen[str]") -> str:
        """The next line of the worker; none if it died, takes too long, or waits for what never comes."""
        assert worker.stdout
        began = used = _processor_seconds(worker.pid)
        still = 0
        with selectors.DefaultSelector() as ready:
            ready.register(worker.stdout, selectors.EVENT_READ)
            while not ready.select(1.0):
                now = _processor_seconds(worker.pid)
                still = still + 1 if now == used else 0
                used = now
                if used - began > HOPELESS or still > STILL:
                    return ""
        return worker.stdout.readline()

    def _guarded(self) -> list[tuple[str, int, int]]:
        paths = sorted(self.guard.rglob("*"))
        return [(str(path), path.lstat().st_mtime_ns, path.lstat().st_size) for path in [self.guard, *paths]]

    def _touched(self, folder: Path) -> list[str]:
        """What changed around the case's folder."""
        others = {path.name for path in self.work.iterdir()} - {"guard", "worker.log", "cache", folder.name}
        strange = [name for name in others if not name.startswith("case-")]
        return ["guard changed"] * (self._guarded() != self.before) + [f"made {name}" for name in strange]


def _processor_seconds(pid: int) -> float:
    """What a process has used so far, its threads included."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _wrong(case: Case, answer: dict[str, Any]) -> list[str]:
    """What must hold for every case and does not."""
    said = answer["said"]
    found = []
    if answer["raised"] or "Traceback (most recent call last)" in said:
        found.append("traceback")
    if answer["code"] not in (0, 1, 2):
        found.append(f"exit code {answer['code']}")
    if answer["seconds"] > SECONDS:
        found.append("slow")
    if answer["memory"] > MEMORY:
        found.append("memory")
    if answer["outside"]:
        found.append("outside")
    if _OBEYED.search(said):
        found.append("escapes")
    if answer["code"] in (1, 2) and not answer["raised"]:
        if not any(name and name in said for name in (_shown(name) for name in case.names)):
            found.append("names no file")
        if not _REMEDY.search(said):
            found.append("no remedy")
    return found


def _shown(name: str) -> str:
    return _OBEYED.sub(lambda found: f"\\u{ord(found[0]):04x}", name)


def campaign(bench: Bench, cases: int, number: int, on_case: Any = lambda report: None) -> Report:
    """Draw so many cases and run them; what is found wrong is in the report, and ends nothing."""
    report = Report()

    @seed(number)
    @settings(
        max_examples=cases,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(CASES)
    def one(case: Case) -> None:
        if report.cases < cases:
            bench.run(case, report)
            on_case(report)

    one()
    return report
