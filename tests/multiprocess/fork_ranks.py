"""Processes of one script that share its imports: torch takes seconds to import, a fork does not.

    python fork_ranks.py SCRIPT WORLD PORT …     # as `python SCRIPT RANK WORLD PORT …`, once a rank

The script is imported, its `main` runs in every rank. Exits with the output of the first rank that failed; the others
are killed then.
"""

import importlib
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import NoReturn


def main() -> None:
    script, world = Path(sys.argv[1]), int(sys.argv[2])
    module = importlib.import_module(script.stem)
    with ExitStack() as stack:
        outputs = [stack.enter_context(tempfile.TemporaryFile()) for _ in range(world)]
        failed = _run(script, world, module.main, [output.fileno() for output in outputs])
        if failed is None:
            return
        outputs[failed].seek(0)
        text = outputs[failed].read().decode(errors="replace")
    sys.exit(f"rank {failed} of {world} failed:\n{text}")


def _run(script: Path, world: int, run: Callable[[], None], outputs: Sequence[int]) -> int | None:
    """The first rank that failed, after the others were killed; None if none did.

    A rank that is done waits for the others: it may be the one whose store they still read.
    """
    done_read, done_write = os.pipe()
    over_read, over_write = os.pipe()
    ranks: dict[int, int] = {}
    for rank, output in enumerate(outputs):
        process = os.fork()
        if process == 0:
            os.close(over_write)
            os.dup2(output, 1)
            os.dup2(output, 2)
            sys.argv = [str(script), str(rank), *sys.argv[2:]]
            _exit_after(run, done_write, over_read)
        ranks[process] = rank
    os.set_blocking(done_read, False)
    done = 0
    while ranks:
        process, status = os.waitpid(-1, os.WNOHANG)
        if process:
            rank = ranks.pop(process)
            if status:
                for other in ranks:
                    os.kill(other, signal.SIGKILL)
                return rank
            continue
        with suppress(BlockingIOError):
            done += len(os.read(done_read, world))
            if done == world:
                os.close(over_write)
        time.sleep(0.02)
    return None


def _exit_after(run: Callable[[], None], done: int, over: int) -> NoReturn:
    """End this process with what `run` does, and without what the parent would do at its end."""
    code = 1
    try:
        run()
        code = 0
    except SystemExit as ended:
        if isinstance(ended.code, str):
            sys.stderr.write(ended.code)
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        if not code:
            os.write(done, b".")
            os.read(over, 1)  # its end, when all are done
        os._exit(code)


if __name__ == "__main__":
    main()
