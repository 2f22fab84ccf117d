"""How many ranks can start: connected by level of the network, and by gloo's full mesh beside it.

    python benchmarks/start_up.py [--ranks 1024] [--mesh 256] [--report FILE]

Ranks are processes of this machine that were forked from one which has loaded torch; they find each other in a store
with a token, as those of a run do. By level, a rank connects to its neighbors on levels that join four each, and sums
its number over all ranks by a collective of every level. Beside that, gloo's own world of as many ranks, in which each
connects to all others. Shown are the seconds from the first rank's start until all ranks have their groups, then for
the first sum (all ranks must have the right one) and for the second, and the sockets of a rank, of which two are the
store's and the one that listens. On a few cores the kernel's time goes to gloo's threads, each of which looks at its
sockets a hundred times a second.

Exits non-zero if the ranks by level do not start, or hold more sockets than their levels have neighbors. The last line
is JSON.
"""

import argparse
import json
import os
import secrets
import socket
import sys
import tempfile
from pathlib import Path
from typing import Any

from reports import ROOT, add_report_option, write_report
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

sys.path.insert(0, str(ROOT / "tests" / "multiprocess"))
from ranks import run_ranks

from danlu.comm.store_server import StoreServer

FANOUT = 4
"""Ranks, or blocks of ranks, that a level joins."""
OTHER_SOCKETS = 2
"""To the store, and the one that listens."""
SMALLEST = 64
SECONDS = 580.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=1024, help="most ranks by level")
    parser.add_argument("--mesh", type=int, default=256, help="most ranks of a full mesh")
    add_report_option(parser)
    asked = parser.parse_args()
    if asked.ranks < SMALLEST:
        parser.error(f"--ranks must be {SMALLEST} or more, but is {asked.ranks}")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    runs = [
        (count, kind)
        for count in counts(asked.ranks)
        for kind in ("levels", "mesh")
        if kind == "levels" or count <= asked.mesh
    ]
    columns = (TextColumn("{task.description:<28}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    rows = []
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("", total=len(runs))
        for count, kind in runs:
            progress.update(task, description=f"{count} ranks, {kind}")
            rows.append(start(count, kind))
            progress.advance(task)
    show(rows)
    by_level = [row for row in rows if row["kind"] == "levels"]
    passed = all(not row["failed"] and row["sockets"] <= row["neighbors"] + OTHER_SOCKETS for row in by_level)
    figures = {"passed": passed, "rows": rows, "most": by_level[-1]}
    write_report(asked.report, "start_up", figures)
    print(json.dumps({"benchmark": "start_up", **figures}))
    return 0 if passed else 1


def counts(most: int) -> list[int]:
    """Powers of two."""
    return [SMALLEST << doubled for doubled in range(20) if SMALLEST << doubled <= most]


def level_sizes(count: int) -> list[int]:
    """Levels that join so many ranks."""
    sizes = []
    while count > 1:
        sizes.append(min(FANOUT, count))
        count //= sizes[-1]
    return sizes


def start(count: int, kind: str) -> dict[str, Any]:
    """Start so many ranks, and say how long it took."""
    sizes, token = level_sizes(count) if kind == "levels" else [], secrets.token_bytes(32)
    server = StoreServer(socket.create_server(("127.0.0.1", 0), backlog=4096), token)
    row: dict[str, Any] = {"ranks": count, "kind": kind, "levels": sizes, "failed": ""}
    row["neighbors"] = sum(size - 1 for size in sizes) if sizes else count - 1
    try:
        with tempfile.TemporaryDirectory() as folder:
            script = Path(__file__).with_name("start_up_rank.py")
            store = f"{server.address} {token.hex()}"
            run_ranks(script, count, folder, store, "x".join(map(str, sizes)), seconds=SECONDS)
            told = [json.loads(file.read_text()) for file in Path(folder).iterdir()]
    except (RuntimeError, TimeoutError) as error:
        return row | {"failed": str(error).strip().splitlines()[-1]}
    finally:
        server.close()
    began, forked = min(each["began"] for each in told), max(each["began"] for each in told)
    grouped, summed, again = (max(each[key] for each in told) for key in ("grouped", "summed", "again"))
    return row | {
        "forked_s": forked - began,
        "grouped_s": grouped - began,
        "first_sum_s": summed - grouped,
        "second_sum_s": again - summed,
        "sockets": max(each["sockets"] for each in told),
    }


def show(rows: list[dict[str, Any]]) -> None:
    """A table."""
    table = Table(title="Start-up", title_justify="left")
    for column in ("ranks", "connected", "all forked", "all have groups", "first sum", "second", "sockets a rank"):
        table.add_column(column, justify="left" if column == "connected" else "right")
    for row in rows:
        connected = "by level" if row["levels"] else "to all others"
        if row["failed"]:
            table.add_row(str(row["ranks"]), connected, f"failed: {row['failed']}")
            continue
        seconds = [f"{row[key]:.1f} s" for key in ("forked_s", "grouped_s", "first_sum_s", "second_sum_s")]
        table.add_row(str(row["ranks"]), connected, *seconds, str(row["sockets"]))
    Console(width=None if sys.stdout.isatty() else 140).print(table)


if __name__ == "__main__":
    sys.exit(main())
