"""A process that runs commands of `danlu` on bad files, one after another, and reports what each did.

Reads a JSON line a case from standard input: the folder and the words of the command. Answers with a JSON line: exit
code, what was said, what was raised, processor seconds, peak memory, and writes outside the folder.
"""

import faulthandler
import json
import os
import resource
import sys
import time
import traceback
from pathlib import Path
from typing import Any

MEMORY = 1 << 30
"""Bytes of address space that a case may take beyond what the process had."""
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_CHANGES = {"os.mkdir": 0, "os.rename": 1, "os.remove": 0, "os.rmdir": 0, "os.symlink": 1, "os.link": 1}
_CHANGES |= {"os.truncate": 0, "os.chmod": 0, "os.chown": 0, "os.utime": 0}
_STARTS = ("os.system", "subprocess.Popen", "os.exec", "os.posix_spawn", "socket.connect")


class Watch:
    """Writes, processes and connections of the case that runs now, seen by an audit hook."""

    def __init__(self) -> None:
        self.folder: Path | None = None
        self.outside: list[str] = []
        sys.addaudithook(self._see)

    def _see(self, event: str, arguments: tuple[Any, ...]) -> None:
        folder = self.folder
        if folder is None:
            return
        if event == "open":
            path, mode, flags = arguments
            if (isinstance(mode, str) and set(mode) & set("wax+")) or (not mode and flags & _WRITING):
                self._note(event, path, folder)
        elif event in _CHANGES:
            self._note(event, arguments[_CHANGES[event]], folder)
        elif event.startswith(_STARTS):
            self.outside.append(f"{event} {arguments!r}"[:200])

    def _note(self, event: str, path: Any, folder: Path) -> None:
        if isinstance(path, int) or path is None:
            return
        real = os.path.realpath(os.fsdecode(path))
        if real != "/dev/null" and not real.startswith(f"{folder}/"):
            self.outside.append(f"{event} {real}"[:200])


def _status(key: str) -> int:
    """A figure of this process in bytes: its size (`VmSize`), its memory now (`VmRSS`) or at most (`VmHWM`)."""
    lines = Path("/proc/self/status").read_text("utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:"))


def main() -> None:
    import torch
    from typer.testing import CliRunner

    from danlu.cli.app import app
    from danlu.framework.hf import convert  # imports what the commands would, before time and memory are counted
    from danlu.spec import SpecError

    assert convert
    torch.set_num_threads(1)
    faulthandler.enable()
    watch, runner, answers = Watch(), CliRunner(), os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    answers.write("ready\n")
    answers.flush()
    for line in sys.stdin:
        case = json.loads(line)
        os.chdir(case["folder"])
        Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
        before, began = _status("VmRSS"), time.process_time()
        resource.setrlimit(resource.RLIMIT_AS, (_status("VmSize") + MEMORY, resource.RLIM_INFINITY))
        watch.outside, watch.folder = [], Path(case["folder"])
        result = runner.invoke(app, case["command"])
        watch.folder = None
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        answer = {"code": result.exit_code, "said": result.output, "raised": "", "outside": watch.outside}
        if isinstance(result.exception, SpecError):  # as danlu.cli.app.main tells it
            answer |= {"code": 2, "said": f"{result.output}{result.exception}"}
        elif result.exception is not None and not isinstance(result.exception, SystemExit):
            answer["raised"] = "".join(traceback.format_exception(result.exception))[-3000:]
        answer["said"] = answer["said"][:200_000]
        answer |= {"seconds": time.process_time() - began, "memory": max(0, _status("VmHWM") - before)}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
