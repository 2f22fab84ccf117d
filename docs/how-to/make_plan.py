"""Writes plan.md: every mode beside the real output of its command. Run from the root of the repository.

python docs/how-to/make_plan.py
"""

import shlex
import subprocess
import sys
from pathlib import Path

PAGE = Path("docs/how-to/plan.md")
DENSE = "recipes/llama3-70b.toml --cluster h100-pod"
QUESTIONS = [
    (
        "Which layout?",
        "The fastest that fits, its runners-up, where its time and memory go, and why each neighbor loses. Rows with "
        "`=` are a tie: too close for the cost model to call. They are listed simplest first (fewest parallel axes, "
        "then most free memory), and the first is the answer. The step time has the band of eight of ten published "
        "runs like yours, and every layout its chance to fit: the share of published runs that would have fit, had "
        "they been predicted to take as much of the chip. `--output` writes the plan, `--open` a page with pictures, "
        "`--json` prints JSON.",
        f"danlu plan {DENSE} --chips 256 --output plan.toml",
    ),
    (
        "What fits on fewer chips?",
        "Or what does not, by how much, and how many chips would be enough. By default so much memory is kept free "
        "that 95 % of published runs would have fit; `--reserve` keeps another share. <!-- asserted: "
        "tests/unit/test_fit_chance.py -->",
        f"danlu plan {DENSE} --chips 16",
    ),
    (
        "Why is this rejected?",
        "With the rule and the message of `danlu check`, and exit code 2. Contradicting options are named, too.",
        f"danlu plan {DENSE} --chips 256 --fix tp=16",
    ),
    (
        "Why not this layout?",
        "The fastest layout under a constraint, beside the answer; and whether the two are a tie.",
        f"danlu plan {DENSE} --chips 256 --why-not tp=8,cp=1",
    ),
    (
        "What if the network were faster?",
        "Levels, chip and batch can be changed: by a factor, or to a value as in a cluster file.",
        f"danlu plan {DENSE} --chips 256 --what-if pod.bandwidth=2x",
    ),
    ("What if chips had more memory?", "", f"danlu plan {DENSE} --chips 256 --what-if 'chip.memory=141 GB'"),
    (
        "How many chips for a deadline?",
        "The fewest whole nodes whose best layout trains this many tokens within this many days, failures included. "
        "More nodes are not always faster, and some numbers have no layout, so every number of nodes is considered: "
        "lower bounds on the step rule most of them out, the others are searched.",
        "danlu plan recipes/llama3-70b.toml --cluster h100-pod --chips 2048 --days 120 --tokens 2T",
    ),
    ("How good is my own plan?", "", f"danlu plan {DENSE} --compare recipes/plans/llama3-70b-h100.toml"),
    (
        "What if I fix a degree, or exclude an axis?",
        "",
        f"danlu plan {DENSE} --chips 256 --fix tp=8 --exclude cp,zbv",
    ),
    ("Which layout takes least memory?", "", f"danlu plan {DENSE} --chips 64 --min-memory"),
    (
        "How long may sequences be?",
        "Doubled, at constant tokens per batch, until nothing fits.",
        f"danlu plan {DENSE} --chips 64 --max-length",
    ),
    (
        "What does an uneven router cost?",
        "`--imbalance` is the tokens of the fullest expert rank over the mean.",
        "danlu plan recipes/deepseek.toml --cluster h100-pod --chips 512 --imbalance 1.5 --fix 'pp=8|16,tp=1,cp=1'",
    ),
    (
        "Are the predictions correct?",
        "`--verify` dry-runs the two best layouts, or the given number (the real program; identical layers are run "
        "once), and compares the predictions with it for the fullest rank. A layout whose dry run does not fit the "
        "chip is rejected, and the next one is proposed. It needs torch, and seconds to minutes per layout; up to an "
        "hour with a thousand microbatches.",
        f"danlu plan {DENSE} --chips 1024 --fix pp=1,cp=1 --verify",
    ),
    (
        "How much do failures cost?",
        "With another mean time between failures of a node than the cluster's.",
        f"danlu plan {DENSE} --chips 256 --mtbf '5 d'",
    ),
]
HEAD = """# Plan before you launch

`danlu plan` turns a recipe and a cluster into a plan: the fastest layout, its step time and memory, and why others
lose. It needs neither the chips nor torch. Times are predictions of the cost model; [its accuracy](../planner-truth.md)
is measured against published runs, and its error for runs like yours is part of every answer. [The planner's
page](../rooms/planner.md) lists what is searched and what is proven.

Every result begins with the precision and the chip's peak in it. A recipe without `[precision]` computes in fp32, and
if the chip is far faster in bf16 a warning says what that costs. Use one mode at a time: options that have no effect
together are an error. Bytes are in decimal units (1 GB = 10⁹ bytes) here and everywhere else, as in data
sheets, cluster files and link speeds, so that `memory = "80 GB"` of a cluster's file is the `80.0 GB` of the result. An
H100 of "80 GB" really has 85.5 GB (79.6 GiB): say what yours has, or measure it with `danlu probe`.
<!-- not measured: what a unit means, and a data sheet -->

Every output below is that of the command above it (`docs/how-to/make_plan.py` writes this page).
"""
TAIL = """
## Experts across supernodes, or inside?

On a machine like Sunway (supernodes of 256 with full bandwidth, a network between them that is 16:3
narrower), 512 experts per layer lie on 256 ranks: one in every supernode (with an expert's states sharded inside), or
all in one supernode (with states sharded across). `benchmarks/sunway_mapping.py` prices both over a range of tokens and
experts:

![Step time with experts inside a supernode over that with experts across](../pictures/sunway-mapping.svg)

Few tokens and wide experts: gathering the experts' states costs more than exchanging tokens, so states need the fast
level and experts go across, as in BaGuaLu (Ma et al., PPoPP 2022). Many tokens and narrow experts: the other way
round. The crossover lies between 1,024 and 2,048 tokens per rank and step for experts of 768, at about 8,000 for
experts of 12,288.

Spread half and half over both levels, the same ranks are a few percent faster than across: a sixteenth of the tokens
stays inside a supernode, and exchanges take 15 + 15 rounds instead of 255. BaGuaLu reports up to 1.6 times over a
symmetric mapping, measured with its own software; this cost model does not show that gain.

The 14.5 T model of the catalog on all 96,000 processors is fastest with its experts across all 375 supernodes and
over 32 ranks inside each. Inside one supernode alone they do not fit.
"""


def main() -> None:
    """Run every command and write the page."""
    sections = [HEAD]
    for title, words, command in QUESTIONS:
        sys.stderr.write(f"{command}\n")
        run = subprocess.run([sys.executable, "-m", *shlex.split(command)], capture_output=True, text=True, check=False)
        shown = run.stdout if run.stdout.strip() else run.stderr
        output = "\n".join(line.rstrip() for line in shown.strip().splitlines())
        sections.append(f"## {title}\n\n{words + chr(10) * 2 if words else ''}```console\n$ {command}\n{output}\n```\n")
    PAGE.write_text("\n".join(sections) + TAIL, encoding="utf-8")
    Path("plan.toml").unlink(missing_ok=True)


if __name__ == "__main__":
    main()
