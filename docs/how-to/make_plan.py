"""Writes plan.md: every question beside the real output of its command. Run from the root of the repository.

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
        "The fastest that fits, its runners-up, where its time and its bytes go, and what speaks against each "
        "neighbour. `--out` writes the plan, `--open` a page with pictures, `--json` prints all of it for machines.",
        f"danlu plan {DENSE} --chips 256 --out plan.toml",
    ),
    ("What fits on fewer chips?", "Or what does not, and by how much.", f"danlu plan {DENSE} --chips 16"),
    (
        "Why not this layout?",
        "The best layout under a condition, beside the best of all.",
        f"danlu plan {DENSE} --chips 256 --why-not tp=8,cp=1",
    ),
    (
        "What if the network were faster?",
        "Levels, chip and batch can be changed: by a factor, or to a value as a cluster's file has it.",
        f"danlu plan {DENSE} --chips 256 --what-if pod.bandwidth=2x",
    ),
    ("What if chips had more memory?", "", f"danlu plan {DENSE} --chips 256 --what-if 'chip.memory=141 GB'"),
    (
        "How many chips for a deadline?",
        "The fewest that train so many tokens in so many days, failures included.",
        "danlu plan recipes/llama3-70b.toml --cluster h100-pod --chips 2048 --days 120 --tokens 2T",
    ),
    ("How good is my own plan?", "", f"danlu plan {DENSE} --compare recipes/plans/llama3-70b-h100.toml"),
    (
        "What if I fix a degree, or leave an axis out?",
        "",
        f"danlu plan {DENSE} --chips 256 --fix tp=8 --without cp,zbv",
    ),
    ("Which layout takes least memory?", "", f"danlu plan {DENSE} --chips 64 --leanest"),
    (
        "How long may sequences be?",
        "Doubled, with as many tokens a batch, until nothing fits.",
        f"danlu plan {DENSE} --chips 64 --longest",
    ),
    (
        "What does an uneven router cost?",
        "`--imbalance` is the tokens of the fullest expert rank over the mean.",
        "danlu plan recipes/deepseek.toml --cluster h100-pod --chips 512 --imbalance 1.5 --fix 'pp=8|16,tp=1,cp=1'",
    ),
    (
        "Do the formulas hold?",
        "`--verify` runs the two best layouts dry, or as many as it is told (the same program; layers like their "
        "neighbours are counted once), and shows formula against program for the rank that the program fills most. "
        "A layout whose program does not fit the chip is refused, and the next proposed. It needs torch, and seconds "
        "to minutes a layout; up to an hour with a thousand microbatches.",
        f"danlu plan {DENSE} --chips 1024 --fix pp=1,cp=1 --verify",
    ),
    (
        "What do failures leave?",
        "With another mean time between failures of a node than the cluster's.",
        f"danlu plan {DENSE} --chips 256 --mtbf '5 d'",
    ),
]
HEAD = """# Plan before you launch

`danlu plan` turns a recipe and a cluster into a plan: which layout, how fast, how many bytes on the fullest chip, and
why not the others. It needs neither the chips nor torch. Times are predictions of the cost model; `danlu validate`
shows how far off they are. What is searched, and what is proven of the answer, is said in
[the room's page](../rooms/planner.md).

Every output below is that of the command above it (`docs/how-to/make_plan.py` writes this page).
"""
TAIL = """
## Experts across supernodes, or inside?

On a machine in the manner of Sunway (supernodes of 256 with full bandwidth, a network between them that is 16:3
narrower), 512 experts a layer lie over 256 ranks: one in every supernode (and those that share an expert's states
inside), or all in one supernode (and states shared across). `benchmarks/sunway_mapping.py` prices both for a field of
tokens and experts:

![Step time with experts inside a supernode over that with experts across](../pictures/sunway-mapping.svg)

Few tokens and wide experts: gathering the experts' states weighs more than exchanging tokens, so states want the fast
level and experts go across, as BaGuaLu laid them out (Ma et al., PPoPP 2022). Many tokens and narrow experts: the other
way round. The border lies between 1,024 and 2,048 tokens a rank and step for experts of 768, at about 8,000 for experts
of 12,288.

Spread half and half over both levels, the same ranks are 2 to 6 % faster than across: a sixteenth of the tokens stays
inside a supernode, and exchanges take 15 + 15 rounds instead of 255. BaGuaLu reports up to 1.6 times over a symmetric
mapping, measured with its own software; this cost model does not show that gain.

The 14.5 T model of the catalogue on all 96,000 processors is fastest with its experts across all 375 supernodes and
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
