"""Put the reports of the checkpoint campaigns into `docs/checkpoint-proofs.md` and `.json`.

python benchmarks/ckpt_crashes.py --json crashes.json
python benchmarks/ckpt_damage.py --json damage.json
python benchmarks/ckpt_fuzz.py --engine random --json fuzz-random.json
python benchmarks/ckpt_fuzz.py --engine atheris --json fuzz-atheris.json
python benchmarks/ckpt_proofs.py crashes.json damage.json fuzz-random.json fuzz-atheris.json
"""

import argparse
import json
from collections import Counter
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parents[1] / "docs"

PAGE = """# What checkpoints are proven to survive

Figures of the last full campaigns, put here by `benchmarks/ckpt_proofs.py`; the reports as they were written are in
[checkpoint-proofs.json](checkpoint-proofs.json). CI runs a smaller number of each (`tests/faults`), every time. The
promises that are put to the test: **never a wrong load** (each checkpoint that is listed can be read whole and is,
bit for bit, what was saved) and **never an unloadable run** (once a save has returned, that checkpoint or a later one
is there).

| campaign | command | tried | wrong loads | lost checkpoints |
|---|---|---|---|---|
| states of a crashed disk | `ckpt_crashes.py` | {states:,} states, no two alike | {wrong} | {lost} |
| SIGKILLs of a process that saves | `ckpt_crashes.py` | {kills:,} kills, {saves:,} saves | none, or it ends | none |
| changes to files of a checkpoint | `ckpt_damage.py` | {changes:,} changes | {silent} | – |
| manifests nobody wrote | `ckpt_fuzz.py` | {inputs:,} inputs | {outside} paths left the folder | – |

## Crashes

Every system call of real saves was recorded ({calls:,} calls in {scenarios:,} scenarios: one to three writers whose
calls follow each other in an order drawn by lot, retention, a save that is not finite, one set aside, a second try
after a kill at any call, packs past the page cache). The machine is then stopped between any two calls. What was not
brought to the disk by an `fsync` that returned may be there or not, in any combination: writes absent, whole, torn or
zeros; names given, moved or taken away, in any subset
(all of them where there are few; of many, the extremes and a sample). Two states are alike if
files and the promise to be kept are the same. {ordered:,} of the states can come about on a file system that
keeps the changes of a folder in order, as ext4, XFS and btrfs do; the others only where it does not. In {gone_on:,}
states the run also went on: it saved again, and leftovers were gone afterwards. The model in full is in
`tests/faults/crash_states.py`.

The kills hit a process that saves in a loop on a real disk, at moments drawn by lot; {cut_short:,} of them fell into
a save. Never were there more than {most_files} files below the folder: what killed saves leave does not add up.

## Damage

{found:,} of {changes:,} changes were found by a full verification: bits flipped, bytes lost or added, blocks zeroed,
chunks swapped, files swapped, truncated, removed, or taken from another checkpoint or another attempt; in packs,
texts, second copies and parity alike. Of {layouts:,} loads of a random part of the tensors, {refused:,} touched the
damage and were refused, {right:,} did not, or mended it on their way, and were right; none was silently wrong.

{protected:,} of the changes were made to checkpoints with parity (two blocks for every eight packs). `danlu ckpt mend`
brought {repaired:,} of them back so that every file was byte for byte what it had been. The others
were{beyond}: the manifest itself, without which there is no checkpoint, because deleting one begins with it.

## Texts from strangers

Valid manifests, nodes and leaves were changed with knowledge of the format, and the hashes above them made right
again: {engines}. Of {inputs:,} inputs {fuzz_refused:,} were refused as damaged and {accepted:,} made a checkpoint that
is whole (a change of a text that is for people, for instance). Nothing else was raised ({other} other errors), no path
outside the folder was opened, the slowest input took {slowest:.2f} s of processor time, and the process was held to
512 MiB.

## A store that fails under a training run

`tests/faults/test_store_faults.py` trains with `danlu train` on two ranks while the disk fills up, returns `EIO` from
writes and from `fsync`, and dawdles (a FUSE file system of its own); `test_dead_s3.py` kills an S3 server in the
middle of a save. The losses are those of the run without faults to the last bit, `events.jsonl` names what failed,
nothing half-written is ever listed, and the next save after the store is back succeeds.

## What this does not show

Bytes that rot *and* a crash at the same time; file systems that lie about `fsync`; more than three writers in the
recorded saves (their number changes how many files there are, not the order in which any two of them become durable);
a stranger who can make a manifest that is consistent in itself, because hashes are no signatures.
"""


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    options.add_argument("crashes", type=Path)
    options.add_argument("damage", type=Path)
    options.add_argument("fuzz", type=Path, nargs="+", help="one report of each engine")
    asked = options.parse_args()
    crashes, damage, *fuzz = (json.loads(p.read_text("utf-8")) for p in (asked.crashes, asked.damage, *asked.fuzz))
    reports = {"crashes": crashes, "damage": damage, "fuzz": fuzz}
    (DOCS / "checkpoint-proofs.json").write_text(json.dumps(reports, indent=1) + "\n", "utf-8")
    (DOCS / "checkpoint-proofs.md").write_text(PAGE.format(**_figures(**reports)), "utf-8")


def _figures(crashes: dict[str, Any], damage: dict[str, Any], fuzz: list[dict[str, Any]]) -> dict[str, Any]:
    states, kills, told = crashes["states"], crashes["kills"], damage["by writers"]
    total = {key: sum(each[key] for each in told.values()) for key in ("changes", "found", "layouts", "repaired")}
    beyond = sum((Counter(each["beyond"]) for each in told.values()), Counter[str]())
    lines = {
        "atheris": "{inputs:,} inputs guided by which lines of the reader they reached (atheris)",
        "random": "{inputs:,} inputs drawn by lot",
    }
    return total | {
        "states": states["states"],
        "ordered": states["ordered"],
        "gone_on": states["gone_on"],
        "calls": states["calls"],
        "scenarios": states["scenarios"],
        "lost": sum("none is listed" in line for line in states["wrong"]),
        "wrong": sum("none is listed" not in line for line in states["wrong"]),
        "kills": kills["kills"],
        "saves": kills["saves"],
        "cut_short": kills["cut_short"],
        "most_files": kills["most_files"],
        "silent": sum(len(each["silent"]) for each in told.values()),
        "refused": sum(each["layouts_refused"] for each in told.values()),
        "right": sum(each["layouts_right"] for each in told.values()),
        "protected": sum(each["changes"] for name, each in told.items() if not name.endswith("parity 0")),
        "beyond": ", ".join(f" {count} × {kind}" for kind, count in sorted(beyond.items())) or " none",
        "inputs": sum(each["inputs"] for each in fuzz),
        "accepted": sum(each["accepted"] for each in fuzz),
        "fuzz_refused": sum(each["refused"] for each in fuzz),
        "outside": sum(each["outside"] for each in fuzz),
        "other": sum(len(each["other"]) for each in fuzz),
        "slowest": max(each["slowest"] for each in fuzz),
        "engines": ", ".join(lines[each["engine"]].format(**each) for each in fuzz),
    }


if __name__ == "__main__":
    main()
