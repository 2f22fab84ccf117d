"""Everything that `.ci/run` leaves out: every layout and case, the campaigns, the timings. Hours, at rest.

    bash .ci/full                       # all parts; docs/reports/full.json gets a row for each as it ends
    bash .ci/full --only "bad input"    # parts whose name contains the text; may be repeated
    bash .ci/full --list                # names and commands, nothing runs

Every part runs even if one before it failed. Exits with 1 unless all that ran have passed.
"""

import argparse
import json
import shlex
import subprocess
import sys
import time
from datetime import UTC, datetime
from typing import Any

from reports import ROOT, commit, write_report

REPORTS = "docs/reports"
PARTS = {
    "every unit test": "pytest tests/unit -n auto --dist loadfile",
    "every layout and case of real ranks": f"pytest tests/multiprocess --reports {REPORTS}",
    "every engine": "pytest tests/engines",
    "every fault": "pytest tests/faults",
    "planted faults": "benchmarks/mutations.py --write",
    "resharding, all pairs": f"tests/multiprocess/test_reshard.py --report {REPORTS}/reshard.json",
    "bad input": f"benchmarks/bad_input.py --cases 10000 --report {REPORTS}/bad_input.json",
    "crash states": f"benchmarks/ckpt_crashes.py --report {REPORTS}/ckpt_crashes.json",
    "crash states of real ranks and data": f"benchmarks/recorded_crashes.py --report {REPORTS}/recorded_crashes.json",
    "damage": f"benchmarks/ckpt_damage.py --report {REPORTS}/ckpt_damage.json",
    "fuzzed manifests": f"benchmarks/ckpt_fuzz.py --report {REPORTS}/ckpt_fuzz.json",
    "dry run: truth": f"benchmarks/dryrun_truth.py --report {REPORTS}/dryrun_truth.json",
    "dry run: scale": f"benchmarks/dryrun_scale.py --report {REPORTS}/dryrun_scale.json",
    "wire: truth": "benchmarks/wire_truth.py",
    "collectives": "benchmarks/collectives.py",
    "collectives inside a host": f"benchmarks/host_collectives.py --report {REPORTS}/host_collectives.json",
    "collectives against numpy": f"benchmarks/collective_fuzz.py --report {REPORTS}/collective_fuzz.json",
    "start-up": f"benchmarks/start_up.py --report {REPORTS}/start_up.json",
    "dispatch": f"benchmarks/dispatch.py --report {REPORTS}/dispatch.json",
    "dispatch in parts": f"benchmarks/dispatch_overlap.py --report {REPORTS}/dispatch_overlap.json",
    "attention of documents": f"benchmarks/attention_masks.py --report {REPORTS}/attention_masks.json",
    "topology": f"benchmarks/topology.py --report {REPORTS}/topology.json",
    "routers": f"benchmarks/routers.py --report {REPORTS}/routers.json",
    "chaos": f"benchmarks/chaos.py --faults 1000 --report {REPORTS}/chaos.json",
    "recovery": f"benchmarks/recovery.py --report {REPORTS}/recovery.json",
    "hangs": f"benchmarks/hangs.py --report {REPORTS}/hangs.json",
    "stragglers": f"benchmarks/stragglers.py --report {REPORTS}/stragglers.json",
    "replica votes": f"benchmarks/replica_votes.py --report {REPORTS}/replica_votes.json",
    "cost of resilience": f"benchmarks/resilience_cost.py --report {REPORTS}/resilience_cost.json",
    "effective time": f"benchmarks/effective_time.py --report {REPORTS}/effective_time.json",
    "plan: scale": f"benchmarks/plan_scale.py --report {REPORTS}/plan_scale.json",
    "plan: truth": f"benchmarks/plan_truth.py --report {REPORTS}/plan_truth.json",
    "checkpoint speed": f"benchmarks/ckpt_speed.py --report {REPORTS}/ckpt_speed.json",
    "spikes": f"benchmarks/spikes.py --report {REPORTS}/spikes.json",
    "overhead": f"benchmarks/overhead.py --report {REPORTS}/overhead.json",
}
RESULT = ROOT / REPORTS / "full.json"


def main() -> int:
    """Run the requested parts and print which passed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", default=[], metavar="TEXT", help="parts whose name holds it")
    parser.add_argument("--list", action="store_true", help="show the parts, run nothing")
    arguments = parser.parse_args()
    wanted = [name for name in PARTS if not arguments.only or any(text in name for text in arguments.only)]
    if not wanted:
        parser.error(f"no part has such a name; the parts are: {', '.join(PARTS)}")
    if arguments.list:
        for name in wanted:
            print(f"{name:38} {command_line(name)}")
        return 0
    results = {}
    for number, name in enumerate(wanted, 1):
        print(f"\n=== {number} of {len(wanted)}: {name}\n{command_line(name)}", flush=True)
        results[name] = run_part(name)
        record({name: results[name]})
    print()
    for name, row in results.items():
        print(f"{row['seconds']:6d} s  {'passed' if row['passed'] else 'FAILED'}  {name}")
    return 0 if all(row["passed"] for row in results.values()) else 1


def command_line(name: str) -> str:
    """The command of a part, as it would be typed."""
    words = PARTS[name]
    return f"python {'-m ' if words.startswith('pytest') else ''}{words}"


def run_part(name: str) -> dict[str, Any]:
    """Run one part; a row of the report."""
    began = time.monotonic()
    code = subprocess.run([sys.executable, *shlex.split(command_line(name))[1:]], cwd=ROOT).returncode
    return {
        "passed": code == 0,
        "seconds": round(time.monotonic() - began),
        "date": datetime.now(UTC).date().isoformat(),
        "commit": commit(),
    }


def record(rows: dict[str, dict[str, Any]]) -> None:
    """Add rows to the report of earlier ones, in the order of the parts."""
    earlier = json.loads(RESULT.read_text("utf-8"))["figures"]["parts"] if RESULT.exists() else {}
    known = earlier | rows
    parts = {name: known[name] for name in PARTS if name in known}
    write_report(RESULT, "full", {"parts": parts}, "bash .ci/full")


if __name__ == "__main__":
    sys.exit(main())
