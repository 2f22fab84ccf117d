"""Train six recipes with this tree and with another commit of it, and compare every loss, norm and final tensor.

    python benchmarks/same_bits.py                     # compares with the newest commit
    python benchmarks/same_bits.py --base v0.3.0       # compares with any other
    python benchmarks/same_bits.py --only custom       # those whose name contains the text; may be repeated

For refactors, which must not change a bit. The other commit is checked out in a temporary worktree. Losses and norms
are compared as written in the run's events, with all their digits; the final parameters and the optimizer's states by
the fingerprints of the last checkpoint. Exits with 1 if anything differs.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reports import add_report_option, write_report
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]

RECIPE = """
name = "same-bits"
seed = 3
steps = 8
{model}

[data]
shards = "shards"
source = ["python-stdlib"]

[batch]
sequences = 8
length = 64

[optimizer]
learning_rate = 3e-3

[schedule]
warmup = 3
"""
FOUR_RANKS = "microbatches = 2\n[degrees]\npp = 2\nshard = 2\n"
EXPERTS_ON_FOUR = "microbatches = 2\n[degrees]\npp = 2\nshard = 2\nep = 2\n"
DENSE = '[model]\nbase = "tiny-llama"\nvocabulary = 264\n'
EXPERTS = '[model]\nbase = "tiny-moe"\nvocabulary = 264\n'
CUSTOM = f"""
[model]
factory = "plain:Gpt"
path = "{ROOT}/examples"
vocabulary = 264
arguments = {{ vocabulary = 264, layers = 4 }}
"""
HUGGING_FACE = 'weights = "imported"\n'


@dataclass(frozen=True)
class Case:
    """One recipe on one layout."""

    name: str
    model: str
    plan: str | None = None


CASES = (
    Case("dense", DENSE),
    Case("dense, 4 ranks", DENSE, FOUR_RANKS),
    Case("experts", EXPERTS),
    Case("experts, 4 ranks", EXPERTS, EXPERTS_ON_FOUR),
    Case("custom module", CUSTOM),
    Case("Hugging Face import", HUGGING_FACE),
)


def main() -> int:
    """Train with both trees and print what differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", default="HEAD", metavar="COMMIT", help="what to compare with; HEAD if left out")
    parser.add_argument("--only", action="append", default=[], metavar="TEXT", help="cases whose name holds it")
    add_report_option(parser)
    arguments = parser.parse_args()
    cases = [case for case in CASES if not arguments.only or any(text in case.name for text in arguments.only)]
    if not cases:
        parser.error(f"no case has such a name; there are: {', '.join(case.name for case in CASES)}")
    rows = []
    with tempfile.TemporaryDirectory(prefix="danlu-same-bits-") as scratch, _checked_out(arguments.base) as base:
        folder = Path(scratch)
        _make_hugging_face_model(folder / "hf")
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, disable=not sys.stdout.isatty()) as progress:
            task = progress.add_task("", total=2 * len(cases))
            for case in cases:
                outcomes = []
                for which, tree in (("base", base), ("this tree", ROOT)):
                    progress.update(task, description=f"{case.name}: {which}")
                    outcomes.append(_train(tree, case, folder / which.replace(" ", "-")))
                    progress.advance(task)
                rows.append(_compare(case.name, *outcomes))
                if not sys.stdout.isatty():
                    print(f"{case.name}: {rows[-1]['difference'] or 'equal to the last bit'}", flush=True)
    _show(rows, arguments.base)
    different = [row for row in rows if row["difference"]]
    write_report(
        arguments.report, "same_bits", {"base": _commit(arguments.base), "rows": rows, "different": len(different)}
    )
    return 1 if different else 0


@contextmanager
def _checked_out(commit: str) -> Iterator[Path]:
    """A worktree of another commit, removed at the end."""
    with tempfile.TemporaryDirectory(prefix="danlu-base-") as scratch:
        tree = Path(scratch) / "tree"
        _git("worktree", "add", "--quiet", "--detach", str(tree), _commit(commit))
        try:
            yield tree
        finally:
            _git("worktree", "remove", "--force", str(tree))


def _make_hugging_face_model(folder: Path) -> None:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=264,
        hidden_size=64,
        intermediate_size=176,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=256,
        tie_word_embeddings=True,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)


def _train(tree: Path, case: Case, folder: Path) -> dict[str, Any]:
    """Train a case with the code of `tree`; its steps and the fingerprints of its last checkpoint."""
    folder.mkdir(exist_ok=True)
    if case.model == HUGGING_FACE:
        _danlu(tree, folder, "import", "hf", str(folder.parent / "hf"), "-o", "imported", "--no-compare")
    run = case.name.replace(" ", "-").replace(",", "").lower()
    (folder / f"{run}.toml").write_text(RECIPE.format(model=case.model))
    command = ["train", f"{run}.toml", "--name", run]
    if case.plan:
        (folder / "plan.toml").write_text(case.plan)
        command += ["--plan", "plan.toml"]
    _danlu(tree, folder, *command)
    events = [json.loads(line) for line in (folder / "runs" / run / "events.jsonl").read_text().splitlines()]
    last = max((folder / "runs" / run / "checkpoints").glob("step-*/manifest.json"))
    tensors = json.loads(last.read_text())["tensors"]
    return {
        "steps": [(event["step"], event["loss"], event["norm"]) for event in events if event["kind"] == "step"],
        "tensors": {name: tensor["fingerprint"] for name, tensor in tensors.items()},
    }


def _danlu(tree: Path, folder: Path, *arguments: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "danlu", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(tree / "src"), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(
            f"danlu {' '.join(arguments)} failed in {tree} (exit {done.returncode}):\n{done.stdout[-4000:]}"
        )


def _compare(name: str, base: dict[str, Any], ours: dict[str, Any]) -> dict[str, Any]:
    difference = ""
    if base["tensors"].keys() != ours["tensors"].keys():
        difference = f"tensors: {sorted(base['tensors'].keys() ^ ours['tensors'].keys())[:3]}"
    elif unequal := [tensor for tensor, mark in base["tensors"].items() if ours["tensors"][tensor] != mark]:
        difference = f"{len(unequal)} of {len(base['tensors'])} tensors, the first {unequal[0]}"
    for before, after in zip(base["steps"], ours["steps"], strict=False):
        if before != after:
            difference = f"step {before[0]}: loss {before[1]!r} and {after[1]!r}, norm {before[2]!r} and {after[2]!r}"
            break
    if len(base["steps"]) != len(ours["steps"]):
        difference = f"{len(base['steps'])} steps and {len(ours['steps'])}"
    return {"case": name, "steps": len(ours["steps"]), "tensors": len(ours["tensors"]), "difference": difference}


def _show(rows: list[dict[str, Any]], base: str) -> None:
    table = Table(title=f"This tree against {base} ({_commit(base)[:10]})")
    table.add_column("recipe")
    table.add_column("steps", justify="right")
    table.add_column("tensors", justify="right")
    table.add_column("losses, norms, final tensors")
    for row in rows:
        verdict = f"[bold red]{row['difference']}[/]" if row["difference"] else "equal to the last bit"
        table.add_row(row["case"], str(row["steps"]), str(row["tensors"]), verdict)
    Console().print(table)


def _commit(name: str) -> str:
    return _git("rev-parse", "--verify", f"{name}^{{commit}}")


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"git {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
