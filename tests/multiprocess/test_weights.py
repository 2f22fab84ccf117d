"""A run that starts from weights in files: every layout reads the same model, and trains it the same."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from deviations import FIGURES, gather, selected
from layouts import recipe
from ranks import run_ranks

from danlu.spec import RunFolder, StepEvent, toml

pytest.importorskip("transformers", reason="weights are read with safetensors, and compared with transformers")

from weights_rank import LAYOUTS, MODELS

RANK = Path(__file__).parent / "weights_rank.py"
BAR = 1e-5
QUICK = ("tp", "tied, tp", "ep")


@pytest.fixture(scope="module")
def trained(folder: Path, request: pytest.FixtureRequest) -> Path:
    names = [name for name in LAYOUTS if name in selected(request)]
    processes = max((LAYOUTS[name][1].degrees.world for name in names), default=1)
    run_ranks(RANK, processes, str(folder), json.dumps(names), seconds=900)
    return folder


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.full) for name in LAYOUTS]
)
def test_a_layout_starts_and_trains_as_one_process(name: str, trained: Path) -> None:
    _, plan = LAYOUTS[name]
    ranks = plan.degrees.world
    found = gather((json.loads((trained / f"{name}-{rank}.json").read_text()) for rank in range(ranks)), ranks)
    assert all(found[figure] <= BAR for figure in FIGURES), found


def danlu(folder: Path, *arguments: str) -> str:
    command = [sys.executable, "-m", "danlu", *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=540)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def test_train_from_weights_and_export(trained: Path) -> None:
    base, changes = MODELS["tied"]
    made = recipe(base, "shards", changes).model_copy(update={"name": "tuned", "weights": "tied", "steps": 3})
    (trained / "tuned.toml").write_text(toml.dumps(made))
    danlu(trained, "train", "tuned.toml", "--nproc", "2")
    events = RunFolder(trained / "runs" / "tuned").read_events()
    losses = [event.loss for event in events if isinstance(event, StepEvent)]
    expected = json.loads((trained / "tied.json").read_text())
    assert losses[0] == pytest.approx(expected["loss"][0], rel=BAR)
    figures = json.loads(danlu(trained, "export", "hf", "tuned@3", "-o", "exported", "--json"))
    assert figures["architecture"] == "Qwen3ForCausalLM"
    assert figures["step"] == 3 and figures["compared"] and figures["good"]


def test_text_of_two_ranks_is_what_transformers_generates_from_the_export(trained: Path) -> None:
    """`danlu sample` reads the checkpoint of a sharded run; the export is another way to the same weights."""
    import transformers

    if not (trained / "exported").is_dir():
        test_train_from_weights_and_export(trained)
    asked = ["--prompt", "def f(", "--temperature", "0", "--tokens", "12", "--chip", "cpu", "--json"]
    (found,) = json.loads(danlu(trained, "sample", "tuned@3", *asked))["samples"]
    model = transformers.AutoModelForCausalLM.from_pretrained(trained / "exported", dtype="float32").eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(trained / "exported")
    prompt = tokenizer("def f(", return_tensors="pt").input_ids
    drawn = model.generate(prompt, max_new_tokens=12, do_sample=False, pad_token_id=0)[0, prompt.shape[1] :]
    assert found["text"] == tokenizer.decode(drawn, skip_special_tokens=True)
