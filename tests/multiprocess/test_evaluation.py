"""Held-out loss and samples are the same at every layout, and evaluating changes nothing of the training."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from deviations import selected, worst
from evaluation_rank import MASKED, RANK_FILE, READ, STEPS, TOKENS, reference
from layouts import LAYOUTS, Layout
from ranks import run_ranks
from tiers import tiered

from danlu.spec import RunFolder
from danlu.storage.data.build import build_dataset
from danlu.storage.data.tokenizer import BytesTokenizer

BAR = 1e-6
NAMES = (
    *("accumulate 4", "moe accumulate 4", "fsdp, kept gathered", "hsdp, accumulate 2", "tp", "cp", "gpt tied, tp"),
    *("moe ep, balanced by bias", "moe ep over tp", "gpipe", "1f1b, layers 3 + 1", "interleaved", "zero-bubble", "zbv"),
    *("fsdp, compiled", "fsdp, recompute full", "fsdp × tp × 1f1b", "tp × zbv", "cp × interleaved"),
    *("fsdp × cp × tp", "moe 1f1b × ep", "moe hsdp × cp × ep 4"),
    *("tp × ring cp", "ring cp × interleaved", "moe ring cp × ep"),
)
QUICK = ("moe ep, balanced by bias", "tp × zbv")
CHOSEN = [layout for layout in LAYOUTS if layout.name in NAMES]


@pytest.fixture(scope="module")
def results(folder: Path, request: pytest.FixtureRequest) -> dict[str, list[dict[str, Any]]]:
    """What every rank of every selected layout found."""
    text = "".join(file.read_text() for file in sorted(Path(pytest.__file__).parent.glob("*.py")))
    for name, tokens in TOKENS.items():
        documents = []
        for number in range(5):
            document = folder / f"{name}-{number}.txt"
            size = tokens // 5 + (number < tokens % 5) - 1  # one more token ends the document
            document.write_text(text[number * 1000 :][:size])
            documents.append(str(document))
        build_dataset(documents, folder / name, BytesTokenizer())
    names = selected(request)
    chosen = [layout for layout in CHOSEN if layout.name in names]
    run_ranks(RANK_FILE, max(each.plan.degrees.world for each in chosen), str(folder), json.dumps(names), seconds=800)
    told = [json.loads(file.read_text()) for file in folder.glob("evaluation-*.json")]
    return {layout.name: [each for each in told if each["name"] == layout.name] for layout in chosen}


@pytest.mark.parametrize("layout", tiered(CHOSEN, QUICK))
def test_held_out_loss_is_that_of_one_process(
    layout: Layout, results: dict[str, list[dict[str, Any]]], folder: Path
) -> None:
    expected = json.loads((folder / f"{reference(layout)}.json").read_text())
    assert expected["samples"][-1] == expected["plain_samples"]
    masked = layout.name in MASKED
    ranks = results[layout.name]
    assert len(ranks) == layout.plan.degrees.world
    for each in ranks:
        assert each["steps"] == [*range(STEPS + 1)]
        if not masked:
            assert each["tokens"] == {"long": READ, "short": 5 * 32}
        assert each["samples"] == expected["samples"]
        assert set(each["ends"]) <= {"tokens", "context", "end of text"} and "context" in each["ends"]
        assert each["sharded"], "parameters are still gathered after the last evaluation"
        assert each["undisturbed"], "evaluation changed losses, norms or balance of the training"
        apart = worst(
            abs(found[name] - wanted[name]) / wanted[name]
            for found, wanted in zip(each["evaluations"], expected["evaluations"], strict=True)
            for name in TOKENS
        )
        assert apart <= BAR, apart
        if masked:
            assert each["tokens"]["short"] == 5 * 32 - 4  # four documents end before the last token
            continue
        plain = worst(abs(each["evaluations"][-1][name] - expected["plain"][name]) for name in TOKENS)
        assert plain <= 1e-5, plain  # after training: parameters of layouts differ by rounding


def test_enough_layouts() -> None:
    assert len(CHOSEN) == len(NAMES) >= 12


def test_a_checkpoint_is_evaluated_and_sampled_as_the_run_was(folder: Path, tmp_path: Path) -> None:
    """`danlu train` with evaluation on one rank, then `danlu evaluate` on two and `danlu sample`: losses and text."""
    (tmp_path / "held.txt").write_text("What was not read says whether a model learns. " * 40)
    recipe = f"""
        name = "small"
        steps = 2
        model = {{ base = "tiny-llama", vocabulary = 264 }}
        data = {{ shards = "{folder / "shards"}" }}
        batch = {{ sequences = 4, length = 64 }}
        [evaluation]
        data = [{{ name = "kept", shards = "held", source = ["held.txt"] }}]
        prompts = ["The old furnace", ""]
        sample_tokens = 20
    """
    (tmp_path / "recipe.toml").write_text(recipe)

    def danlu(*arguments: str) -> str:
        command = [sys.executable, "-m", "danlu", *arguments]
        ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=900)
        assert ended.returncode == 0, ended.stdout + ended.stderr
        return ended.stdout

    danlu("train", "recipe.toml")
    events = [event for event in RunFolder(tmp_path / "runs" / "small").read_events() if event.kind == "evaluated"]
    assert [event.step for event in events] == [2]
    told = json.loads(danlu("evaluate", "small@2", "--nproc", "2", "--json"))
    assert told["data"]["kept"]["tokens"] == events[0].tokens["kept"] == 1856
    assert told["data"]["kept"]["loss"] == pytest.approx(events[0].losses["kept"], rel=BAR)
    (file,) = (tmp_path / "runs" / "small" / "samples").iterdir()
    drawn = json.loads(file.read_text())
    assert (drawn["step"], drawn["temperature"], len(drawn["samples"])) == (2, 0, 2)
    again = json.loads(
        danlu("sample", "small@2", "-p", "The old furnace", "-p", "", "--temperature", "0", "--tokens", "20", "--json")
    )
    assert again["samples"] == drawn["samples"]
