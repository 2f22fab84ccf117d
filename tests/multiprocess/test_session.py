"""A training process can leave its world and join another: three worlds in a row are, bit for bit, one."""

import json
from pathlib import Path
from typing import Any

from layouts import recipe
from ranks import run_ranks
from session_rank import STEPS

from danlu.spec import toml
from danlu.spec.plan import Degrees, Plan
from danlu.spec.run_folder import RunFolder

RANK = Path(__file__).parent / "session_rank.py"


def test_three_worlds_in_a_row_are_one_run(folder: Path) -> None:
    made = recipe("tiny-llama", str(folder / "shards"))
    plan = Plan(degrees=Degrees(shard=2), microbatches=2)
    for name in ("one", "three"):
        run = RunFolder(folder / name)
        run.path.mkdir()
        run.recipe.write_text(toml.dumps(made.model_copy(update={"steps": STEPS})))
        run.plan.write_text(toml.dumps(plan))
    run_ranks(RANK, 2, str(folder), seconds=300)
    assert json.loads((folder / "one-0.json").read_text()) == ["finished"]
    assert json.loads((folder / "three-1.json").read_text()) == ["stopped", "stopped", "finished"]
    assert _steps(folder / "one") == _steps(folder / "three")
    assert _fingerprints(folder / "one") == _fingerprints(folder / "three")


def _steps(run: Path) -> list[tuple[int, float, float]]:
    events = map(json.loads, (run / "events.jsonl").read_text().splitlines())
    return [(event["step"], event["loss"], event["norm"]) for event in events if event["kind"] == "step"]


def _fingerprints(run: Path) -> dict[str, Any]:
    last = max((run / "checkpoints").glob("step-*/manifest.json"))
    return {name: tensor["fingerprint"] for name, tensor in json.loads(last.read_text())["tensors"].items()}
