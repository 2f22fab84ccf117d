"""Faults of `benchmarks/planted`: read from their files, planted in a copy of the tree, and the tests' results."""

import atexit
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator
from compileall import compile_dir
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib.util import cache_from_source
from pathlib import Path
from shutil import copy2, copytree, rmtree
from threading import Lock
from typing import Any

LIMIT = 300.0
"""Timeout in seconds of the tests of one fault: a fault that only shows as a hang is not caught."""
BENCHMARK_LIMIT = 1800.0
"""Timeout in seconds of a fault whose check is a benchmark, which takes turns for minutes."""

_NOT_OURS = {"CI"}
"""Variables that change what tests do; a copy is tested as a developer would test it."""


@dataclass(frozen=True)
class Edit:
    """One text that replaces another, which occurs exactly once in its file."""

    file: str
    old: str
    new: str


@dataclass(frozen=True)
class Fault:
    """Edits that break one guarantee, and the check that must catch it."""

    room: str
    name: str
    check: str
    edits: tuple[Edit, ...]
    quick: bool


@dataclass(frozen=True)
class Outcome:
    """Whether a fault was caught, and by what; or why it was not."""

    fault: Fault
    caught: bool
    witness: str
    seconds: float


def load_faults(root: Path) -> list[Fault]:
    """Every fault of `benchmarks/planted`, by room and in the order of its file; ValueError for an invalid one."""
    faults = []
    for file in sorted((root / "benchmarks" / "planted").glob("*.toml")):
        for table in tomllib.loads(file.read_text())["fault"]:
            faults.append(_fault(file.stem, table))
    names = [fault.name for fault in faults]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"names of faults must be unique, but these are not: {sorted(twice)}")
    return faults


def _fault(room: str, table: dict[str, Any]) -> Fault:
    unknown = set(table) - {"name", "tests", "command", "edits", "quick"}
    if unknown or ("tests" in table) == ("command" in table) or not table.get("edits"):
        raise ValueError(
            f"{room}: {table.get('name')!r} must have edits and either tests or command; unknown: {unknown}"
        )
    check = table.get("command") or shlex.join(["pytest", *table["tests"]])
    return Fault(room, table["name"], check, tuple(Edit(**edit) for edit in table["edits"]), table.get("quick", False))


def plant(root: Path, fault: Fault) -> None:
    """Make the fault's edits below `root`; raises ValueError if the old text does not occur exactly once."""
    for edit in fault.edits:
        path = root / edit.file
        text = path.read_text() if path.exists() else ""
        if edit.old == "" and not path.exists():  # a fault may be a file that should not be there
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(edit.new)
            continue
        if text.count(edit.old) != 1:
            raise ValueError(
                f"{fault.room}: {fault.name!r}: the old text must stand once in {edit.file}, "
                f"but stands {text.count(edit.old)} times: {edit.old!r}"
            )
        path.write_text(text.replace(edit.old, edit.new))
        # Bytecode of a file of the same size and second would be taken for its own.
        Path(cache_from_source(str(path))).unlink(missing_ok=True)


def baseline(root: Path, check: str) -> str:
    """Run a check in a copy without a fault; what failed, or nothing."""
    with _copy(root) as copy:
        caught, witness, _ = _run(copy, check)
    return "" if witness == PASSED else f"fails without the fault: {witness}" if caught else witness


def run_fault(root: Path, fault: Fault, unhealthy: str) -> Outcome:
    """Plant one fault in a copy and run its check; `unhealthy` says what was wrong with the check beforehand."""
    if unhealthy:
        return Outcome(fault, False, unhealthy, 0.0)
    with _copy(root) as copy:
        try:
            plant(copy, fault)
        except ValueError as error:
            return Outcome(fault, False, str(error), 0.0)
        caught, witness, seconds = _run(copy, fault.check)
    return Outcome(fault, caught, "lived" if witness == PASSED else witness, seconds)


PASSED = "passed"


@contextmanager
def _copy(root: Path) -> Iterator[Path]:
    """The files of this tree, with uncommitted changes, as a separate repository."""
    with _COPYING:
        original = _original(root)
    with tempfile.TemporaryDirectory(prefix="danlu-fault-") as folder:
        yield copytree(original, Path(folder) / "danlu")


_COPYING = Lock()


@cache
def _original(root: Path) -> Path:
    """The copy that others are made of. It has bytecode, which is of use to them because they keep the files' times."""
    listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listing, cwd=root, capture_output=True, text=True, check=True).stdout.split("\0")
    names += [str(library.relative_to(root)) for library in root.glob("src/**/*.so")]  # compiled, so git ignores them
    folder = tempfile.mkdtemp(prefix="danlu-faults-")
    atexit.register(rmtree, folder, ignore_errors=True)
    original = Path(folder) / "danlu"
    for name in filter(None, names):
        if (root / name).is_file():
            (original / name).parent.mkdir(parents=True, exist_ok=True)
            copy2(root / name, original / name)
    compile_dir(original / "src", quiet=2)
    # Tests ask git which files there are; it need not read them for that.
    for command in (["git", "init", "-q"], ["git", "add", "--intent-to-add", "."]):
        subprocess.run(command, cwd=original, check=True, capture_output=True)
    return original


def escaped_test_id(name: str) -> str:
    """The name of a test as pytest has it, which escapes what is not ASCII."""
    return name if name.isascii() else name.encode("unicode_escape").decode("ascii")


def _run(copy: Path, check: str) -> tuple[bool, str, float]:
    """Whether a check caught something, what it was, and the seconds it took."""
    program, *rest = shlex.split(check)
    pytest_ends_early = ["-x", "-q", "--tb=no", "-p", "no:cacheprovider"]
    tests = map(escaped_test_id, rest)
    words = [sys.executable, "-m", "pytest", *tests, *pytest_ends_early] if program == "pytest" else None
    command = words or [sys.executable if program == "python" else program, *rest]
    limit = LIMIT if words else BENCHMARK_LIMIT
    environment = {key: value for key, value in os.environ.items() if key not in _NOT_OURS}
    environment |= {"PYTHONPATH": str(copy / "src"), "OMP_NUM_THREADS": "1"}
    began = time.monotonic()
    process = subprocess.Popen(
        command,
        cwd=copy,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,  # so that ranks started by a test are killed with it
    )
    try:
        output, _ = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return False, f"no answer after {limit:.0f} s", limit
    return *_verdict(process.returncode, output, None if words else check), time.monotonic() - began


def _verdict(code: int, output: str, command: str | None) -> tuple[bool, str]:
    if code == 0:
        return False, PASSED
    if command is not None:
        return True, command
    failed = re.search(r"^(?:FAILED|ERROR) (\S+::.+?)(?: - .*)?$", output, re.MULTILINE)
    if code == 1 and failed:
        return True, failed[1]
    last = output.strip().splitlines()[-1:] or ["nothing"]
    return False, f"pytest ended with {code} and no failing test: {last[0]}"
