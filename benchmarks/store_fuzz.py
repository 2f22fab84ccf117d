"""Strangers and stale ranks at the port of a rendezvous store: is anything granted, changed or crashed?

    python benchmarks/store_fuzz.py [--messages 100000] [--seed 0] [--report FILE]

A real store listens on loopback and keeps a key. Noise, hellos that are cut, wrong and replayed proofs, ranks of a
generation that is over, and frames with a bit flipped, sent twice, announced too long or signed and malformed are sent
to it, each over a connection of its own. Exits non-zero unless none of them was granted anything, and a rank that knows
the token still finds the key as it was, and no other. The last line is JSON.
"""

import argparse
import json
import resource
import sys
import time
from pathlib import Path

from reports import add_report_option, write_report
from rich.progress import Progress

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "unit"))
from store_fuzz import GENERATION, TIMEOUT, TOKEN, Strangers, new_server, unharmed

from danlu.comm.token_store import TokenStore


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--messages", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    add_report_option(parser)
    arguments = parser.parse_args()
    server = new_server()
    TokenStore(server.address, TOKEN, GENERATION, TIMEOUT).set("kept", "as it was")
    strangers, began, before = Strangers(server, arguments.seed), time.monotonic(), _peak_bytes()
    with Progress(disable=not sys.stdout.isatty()) as progress:
        task = progress.add_task("messages", total=arguments.messages)
        while strangers.sent < arguments.messages:
            strangers.attack()
            progress.update(task, completed=strangers.sent)
    is_unharmed = unharmed(server)
    server.close()
    figures = {
        "messages": strangers.sent,
        "granted": strangers.granted,
        "unharmed": is_unharmed,
        "seconds": round(time.monotonic() - began, 1),
        "grown_bytes": _peak_bytes() - before,
        "passed": is_unharmed and not strangers.granted,
    }
    print(
        f"{'passed' if figures['passed'] else 'FAILED'}: {strangers.sent:,} messages, {strangers.granted} granted, the "
        f"store is {'as it was' if is_unharmed else 'changed'}"
    )
    write_report(arguments.report, "store_fuzz", figures)
    print(json.dumps({"benchmark": "store_fuzz", **figures}))
    return 0 if figures["passed"] else 1


def _peak_bytes() -> int:
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


if __name__ == "__main__":
    sys.exit(main())
