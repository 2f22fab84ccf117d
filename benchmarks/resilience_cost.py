"""What the machinery for faults costs while there is none: the flight recorder and a snapshot of the state every step.

    python benchmarks/resilience_cost.py [--turns 240] [--report FILE]

Two ranks train under FSDP in one process each, one step with the machinery and one without (a, b, b, a), so that what
else the machine does falls on both alike. A snapshot costs time for the size of the state, a step for its tokens: these
are 2,048 a rank and step. Reported are the median ratio of neighbouring steps and the interval of 95 % of its bootstrap
samples; beside them the milliseconds that were spent in the machinery itself, which are steadier. Exits non-zero if the
median is above 1.01. The last line is JSON.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from reports import ROOT, add_report_option, write_report

sys.path.insert(0, str(ROOT / "tests" / "multiprocess"))
from ranks import run_ranks

from danlu.storage.data.build import build_dataset
from danlu.storage.data.tokenizer import BytesTokenizer

BAR = 1.01
RESAMPLED = 4000
RECIPE = """
name = "cost"
steps = 100000
[model]
base = "tiny-llama"
vocabulary = 264
width = 256
layers = 4
heads = 4
kv_heads = 4
mlp_width = 768
[data]
shards = "shards"
[batch]
sequences = 32
length = 128
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=240, help="steps of each kind")
    add_report_option(parser)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "recipe.toml").write_text(RECIPE)
        build_dataset(["python-stdlib"], folder / "shards", BytesTokenizer())
        script = Path(__file__).with_name("resilience_cost_rank.py")
        run_ranks(script, 2, name, str(arguments.turns), seconds=60 + 20 * arguments.turns)
        found = json.loads((folder / "seconds.json").read_text())
    figures = summarize(found)
    print(
        f"{'passed' if figures['passed'] else 'FAILED'}: a step of {figures['without_s']:.3f} s takes "
        f"{figures['ratio']:.4f} times as long ({figures['low']:.4f} to {figures['high']:.4f}), with "
        f"{figures['state_bytes'] / 1e6:.1f} MB of state a rank; must be {BAR} or less. Spent inside: snapshot "
        f"{1e3 * figures['snapshot_s']:.1f} ms, recorder {1e3 * figures['recorder_s']:.1f} ms"
    )
    write_report(arguments.report, "resilience_cost", figures)
    print(json.dumps({"benchmark": "resilience_cost", **figures}))
    return 0 if figures["passed"] else 1


def summarize(found: dict[str, Any]) -> dict[str, Any]:
    """The ratio of neighbours, and how sure it is."""
    ratios = np.array(found["with"]) / np.array(found["without"])
    dice = np.random.default_rng(0)
    samples = np.median(dice.choice(ratios, (RESAMPLED, len(ratios))), axis=1)
    ratio = float(np.median(ratios))
    return {
        "turns": len(ratios),
        "ratio": ratio,
        "low": float(np.quantile(samples, 0.025)),
        "high": float(np.quantile(samples, 0.975)),
        "percent": 100 * (ratio - 1),
        "snapshot_s": float(np.median(found["snapshot"])),
        "recorder_s": float(np.median(found["recorder"])),
        "without_s": float(np.median(found["without"])),
        "state_bytes": found["state_bytes"],
        "bar": BAR,
        "passed": ratio <= BAR,
    }


if __name__ == "__main__":
    sys.exit(main())
