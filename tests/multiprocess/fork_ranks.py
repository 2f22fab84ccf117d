"""Processes of one script that share its imports: torch takes seconds to import, a fork does not.

    python fork_ranks.py SCRIPT WORLD PORT …     # as `python SCRIPT RANK WORLD PORT …`, once a rank

The script is imported, its `main` runs in every rank. Exits with the output of the first rank that failed; the others
are killed then.
"""

import importlib
import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn


def main() -> None:
    script, world = Path(sys.argv[1]), int(sys.argv[2])
    module = importlib.import_module(script.stem)
    outputs = [tempfile.TemporaryFile() for _ in range(world)]  # noqa: SIM115  # the forks write to them
    ranks: dict[int, int] = {}
    for rank, output in enumerate(outputs):
        process = os.fork()
        if process == 0:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
            sys.argv = [str(script), str(rank), *sys.argv[2:]]
            _exit_after(module.main)
        ranks[process] = rank
    while ranks:
        process, status = os.wait()
        rank = ranks.pop(process)
        if status:
            for other in ranks:
                os.kill(other, 9)
            outputs[rank].seek(0)
            sys.exit(f"rank {rank} of {world} failed:\n{outputs[rank].read().decode(errors='replace')}")


def _exit_after(run: Callable[[], None]) -> NoReturn:
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
        os._exit(code)


if __name__ == "__main__":
    main()
