"""`danlu sample`: text from a checkpoint, what is kept of it, and every way in which it can be refused."""

import json
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any

import made_modules
import pytest
import torch
from made_checkpoints import flip
from made_hf import make_hf
from made_saved_runs import LLAMA, random_weights, save, saved_run
from typer.testing import CliRunner, Result

from danlu.cli.app import app
from danlu.cli.run_checkpoint import open_run_checkpoint
from danlu.cli.sample_output import SamplePrinter
from danlu.framework.decoder.decoder import Decoder
from danlu.framework.full_model import load_full_model
from danlu.framework.generation import generate
from danlu.framework.sampling import Sampling
from danlu.report.run_page import write_run_page
from danlu.report.samples import MAX_CHARACTERS, MAX_SHOWN
from danlu.report.terminal import Console
from danlu.spec import Moe, RunFolder, SpecError, toml
from danlu.spec.custom_model import CustomModel
from danlu.spec.load import load_recipe
from danlu.spec.samples import Sample, SampleSet

HERE = str(Path(__file__).parent)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return saved_run(tmp_path_factory.mktemp("saved"))


def sample(run: RunFolder, *arguments: str, step: int | None = None, **settings: Any) -> Result:
    name = str(run.path) if step is None else f"{run.path}@{step}"
    return CliRunner().invoke(app, ["sample", name, "--chip", "cpu", *arguments], **settings)


def drawn(run: RunFolder, *arguments: str, **settings: Any) -> list[dict[str, Any]]:
    result = sample(run, *arguments, "--json", **settings)
    assert result.exit_code == 0, result.output
    return list(json.loads(result.stdout)["samples"])


def expected_bytes(step: int, prompt: str, tokens: int) -> bytes:
    """Greedy tokens of the weights that were saved, by full forward passes."""
    model = random_weights(Decoder(LLAMA), step)
    ids = list(prompt.encode()) or [256]
    found = []
    with torch.no_grad():
        for _ in range(tokens):
            token = int(model(torch.tensor([ids]))[0, -1, :257].argmax())
            if token == 256:
                break
            found.append(token)
            ids.append(token)
    return bytes(found)


@pytest.mark.parametrize("step", [10, 20])
def test_greedy_text_is_that_of_the_saved_weights(run: RunFolder, step: int) -> None:
    (found,) = drawn(run, "--prompt", "Hello", "--temperature", "0", "--tokens", "30", step=step)
    text = expected_bytes(step, "Hello", 30)
    assert found["text"] == text.decode(errors="replace") and found["tokens"] == len(text)
    plain = sample(run, "--prompt", "Hello", "--temperature", "0", "--tokens", "30", step=step)
    assert plain.stdout.startswith("Hello") and "\ufffd" in plain.stdout
    assert f"made@{step}: {len(text)} tokens in" in plain.stderr


def test_the_newest_checkpoint_is_the_default(run: RunFolder) -> None:
    asked = ["--prompt", "a", "--temperature", "0", "--tokens", "12"]
    assert drawn(run, *asked) == drawn(run, *asked, step=20) != drawn(run, *asked, step=10)


def test_a_sample_depends_on_seed_prompt_and_number_alone(run: RunFolder) -> None:
    alone = drawn(run, "-p", "b", "--tokens", "20")
    among = drawn(run, "-p", "a", "-p", "b", "--tokens", "20", "--count", "3")
    assert [each["prompt"] for each in among] == ["a"] * 3 + ["b"] * 3
    assert among[3] == alone[0] and len({each["text"] for each in among}) == 6
    assert drawn(run, "-p", "b", "--tokens", "20", "--seed", "1") != alone
    assert drawn(run, "-p", "b", "--tokens", "20", "--top-k", "1") == drawn(
        run, "-p", "b", "--tokens", "20", "--temperature", "0"
    )


def test_samples_are_printed_one_after_the_other_with_their_numbers(run: RunFolder) -> None:
    result = sample(run, "-p", "ab", "-p", "cd", "--count", "2", "--tokens", "6")
    headings = [line for line in result.stdout.splitlines() if line.startswith("──")]
    assert headings == [f"── prompt {one} of 2, sample {two} of 2" for one in (1, 2) for two in (1, 2)]
    for each in drawn(run, "-p", "ab", "-p", "cd", "--count", "2", "--tokens", "6"):
        first = each["text"].split("\n")[0].encode("unicode_escape", "replace")[:1].decode()
        assert f"{each['prompt']}{first}"[:2] in result.stdout


def test_a_sample_that_is_ahead_waits_for_its_turn() -> None:
    out = StringIO()
    printer = SamplePrinter(Console(file=out, force_terminal=True, color_system=None, width=20), "p:", 0, 1, 3)
    steps: list[tuple[Callable[..., None], tuple[Any, ...], str]] = [
        (printer.on_text, (0, "a"), "── sample 1 of 3\np:a"),
        (printer.on_text, (1, "x"), ""),
        (printer.on_end, (1,), ""),
        (printer.on_text, (2, "\x1b[2J" + "y" * 30), ""),
        (printer.on_text, (0, "b"), "b"),
        (printer.on_end, (0,), "\n── sample 2 of 3\np:x\n── sample 3 of 3\np:\\u001b[2J" + "y" * 30),
        (printer.on_text, (2, "z"), "z"),
        (printer.on_end, (2,), "\n"),
    ]
    expected = ""
    for call, arguments, shown in steps:
        call(*arguments)
        expected += shown
        assert out.getvalue() == expected


def test_prompts_come_from_options_files_and_standard_input(run: RunFolder, tmp_path: Path) -> None:
    asked = ["--tokens", "3"]
    lines, records = tmp_path / "prompts.txt", tmp_path / "prompts.jsonl"
    lines.write_text("one\n\ntwo\n")
    records.write_text('{"prompt": "three\\nlines"}\n')
    assert [each["prompt"] for each in drawn(run, "-p", "zero", "--prompts", str(lines), *asked)] == [
        "zero",
        "one",
        "two",
    ]
    assert [each["prompt"] for each in drawn(run, "--prompts", str(records), *asked)] == ["three\nlines"]
    assert [each["prompt"] for each in drawn(run, *asked, input="from a pipe\n")] == ["from a pipe"]
    (free,) = drawn(run, *asked, "--temperature", "0", input="")
    assert free["prompt"] == "" and free["text"] == expected_bytes(20, "", 3).decode(errors="replace")


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("none.txt", None, "none.txt:1: prompts: does not exist"),
        ("empty.txt", "\n", "has no prompt"),
        ("a.jsonl", "no\n", "a.jsonl:1: prompts: is not JSON"),
        ("b.jsonl", '{"prompt": "x"}\n{"text": "x"}\n', "b.jsonl:2: prompts: is"),
    ],
)
def test_a_file_without_prompts_is_refused(
    run: RunFolder, tmp_path: Path, name: str, content: str | None, says: str
) -> None:
    if content is not None:
        (tmp_path / name).write_text(content)
    result = sample(run, "--prompts", str(tmp_path / name))
    assert isinstance(result.exception, SpecError) and says in str(result.exception)


def test_a_text_ends_where_the_context_does_and_says_so(run: RunFolder) -> None:
    (found,) = drawn(run, "-p", "x" * 90, "--tokens", "40", "--temperature", "0")
    assert found["tokens"] == 6 and found["ended"] == "context"
    result = sample(run, "-p", "x" * 90, "--tokens", "40", "--temperature", "0")
    assert "the model's context of 96 tokens is full" in result.stderr
    assert "may have 96 tokens, but the run trains on sequences of 64" in result.stderr
    (short,) = drawn(run, "-p", "x" * 60, "--temperature", "0")
    assert short["tokens"] <= 4 and short["ended"] != "context"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["-p", "x" * 96], "the prompt has 96 tokens, but must have fewer than the model's context of 96"),
        (["--temperature", "0", "--top-p", "0.5"], "--top-p has no effect with --temperature 0"),
        (["--temperature", "0", "--top-k", "5"], "--top-k has no effect with --temperature 0"),
        (["--temperature", "0", "--count", "2"], "--count has no effect with --temperature 0"),
        (["--temperature", "0", "--seed", "2"], "--seed has no effect with --temperature 0"),
        (["--top-p", "0"], "`top_p` must be above 0"),
    ],
)
def test_what_has_no_meaning_is_refused(run: RunFolder, arguments: list[str], says: str) -> None:
    result = sample(run, *arguments)
    assert result.exit_code == 2 and says in result.stderr and result.stdout == ""


def test_what_does_not_exist_is_named(run: RunFolder, tmp_path: Path) -> None:
    for name, says in (
        ("mad", "did you mean `made`?"),
        ("made@15", "has no checkpoint of step 15; saved are [10, 20]"),
        ("made@last", 'has "last" for its step'),
    ):
        result = CliRunner().invoke(app, ["sample", name, "--runs-dir", str(run.path.parent)])
        assert isinstance(result.exception, SpecError) and says in str(result.exception)
    fresh = saved_run(tmp_path, steps=())
    result = sample(fresh)
    assert isinstance(result.exception, SpecError) and "has no complete checkpoint" in str(result.exception)


def test_a_vocabulary_or_tokenizer_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    run = saved_run(tmp_path, LLAMA.model_copy(update={"vocabulary": 200}), steps=(1,))
    result = sample(run)
    assert isinstance(result.exception, SpecError)
    assert "has token ids up to 256, but `model.vocabulary` is 200" in str(result.exception)
    recipe = load_recipe(run.recipe)
    run.recipe.write_text(toml.dumps(recipe.model_copy(update={"model": LLAMA})))
    index = tmp_path / "shards" / "index.json"
    index.write_text(index.read_text().replace('"bytes"', '"other"'))
    result = sample(run)
    assert isinstance(result.exception, SpecError) and 'was built with "other"' in str(result.exception)


def test_without_the_data_the_tokenizer_is_used_with_a_warning(tmp_path: Path) -> None:
    run = saved_run(tmp_path, steps=(1,))
    (tmp_path / "shards").rename(tmp_path / "elsewhere")
    result = sample(run, "--tokens", "2")
    assert result.exit_code == 0 and "the run's data is not here" in result.stderr


def test_a_corrupt_checkpoint_is_never_sampled(tmp_path: Path) -> None:
    run = saved_run(tmp_path, steps=(1,))
    (pack,) = (path for path in run.checkpoints.rglob("*") if path.is_file() and path.stat().st_size > 100_000)
    flip(pack, 5000)
    result = sample(run)
    assert result.exit_code == 2 and "corrupt" in result.stderr and result.stdout == ""


def test_a_recipe_that_is_not_the_checkpoint_s_is_refused(tmp_path: Path) -> None:
    run = saved_run(tmp_path, steps=(1,))
    recipe = load_recipe(run.recipe)
    run.recipe.write_text(toml.dumps(recipe.model_copy(update={"model": LLAMA.model_copy(update={"layers": 3})})))
    result = sample(run)
    assert result.exit_code == 2 and "blocks.2." in result.stderr


def test_code_that_is_gone_is_reported(tmp_path: Path) -> None:
    made = CustomModel(factory="gone:model", path=str(tmp_path), vocabulary=300)
    result = sample(saved_run(tmp_path, made, steps=(1,), module=made_modules.Chain(vocabulary=300)))
    assert result.exit_code == 2 and '"gone:model" is not found' in result.stderr


def test_logits_that_overflow_are_reported(tmp_path: Path) -> None:
    run = saved_run(tmp_path, steps=())
    module = random_weights(Decoder(LLAMA), 0)
    with torch.no_grad():
        module.get_parameter("head.score.weight").fill_(3e38)
    save(run, 3, module)
    result = sample(run)
    assert result.exit_code == 2 and "logits are not finite" in result.stderr


# --- models of every kind


def test_what_a_router_has_learned_is_read_too(tmp_path: Path) -> None:
    moe = Moe(experts=4, top_k=1, width=24, shared=1, balance="bias")
    model = LLAMA.model_copy(update={"moe": moe, "tied": True})
    saved_run(tmp_path, model, steps=(5,))
    expected = random_weights(Decoder(model), 5)
    checkpoint = open_run_checkpoint("made@5", tmp_path / "runs")
    seen = []
    found = load_full_model(model, checkpoint.fill, torch.device("cpu"), on_progress=lambda *at: seen.append(at))
    tokens = torch.arange(12)[None]
    with torch.no_grad():
        assert torch.equal(found(tokens), expected(tokens))
    assert seen[-1][0] == seen[-1][1] > 0


def test_half_of_the_bits(run: RunFolder) -> None:
    (found,) = drawn(run, "-p", "a", "--dtype", "bf16", "--tokens", "5")
    assert found["tokens"] > 0


def test_a_module_of_the_users_own_is_sampled_without_a_cache(tmp_path: Path) -> None:
    made = CustomModel(factory="made_modules:Chain", path=HERE, vocabulary=300, arguments={"vocabulary": 300})
    module = made_modules.Chain(vocabulary=300)
    run = saved_run(tmp_path, made, steps=(1,), module=module)
    (found, _) = drawn(run, "-p", "abc", "-p", "xyz", "--tokens", "4", "--temperature", "0")
    said = sample(run, "-p", "abc", "-p", "xyz", "--tokens", "4", "--temperature", "0").stderr
    assert said.count("warning: Chain has no KV cache") == 1
    with pytest.warns(RuntimeWarning):
        tokens = [step[0] for step in generate(module, list(b"abc"), Sampling(temperature=0), tokens=4, vocabulary=257)]
    assert found["text"] == bytes(token for token in tokens if token is not None).decode(errors="replace")


def test_a_model_of_transformers_is_sampled_with_its_own_cache(tmp_path: Path) -> None:
    import transformers

    source = make_hf(tmp_path / "source", "llama")
    settings = json.loads((source / "config.json").read_text()) | {"vocab_size": 264, "max_position_embeddings": 80}
    (source / "config.json").write_text(json.dumps(settings))
    (tmp_path / "factory.py").write_text(
        "from transformers import AutoConfig, AutoModelForCausalLM\n"
        "def model(folder): return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))\n"
    )
    made = CustomModel(factory="factory:model", path=str(tmp_path), vocabulary=264, arguments={"folder": str(source)})
    module = transformers.LlamaForCausalLM(transformers.AutoConfig.from_pretrained(source))
    run = saved_run(tmp_path, made, steps=(1,), module=module)
    (found,) = drawn(run, "-p", "abc", "--tokens", "12", "--temperature", "0")
    with torch.no_grad():
        expected = (
            module.eval()
            .generate(
                torch.tensor([list(b"abc")]), max_new_tokens=12, do_sample=False, eos_token_id=256, pad_token_id=0
            )[0, 3:]
            .tolist()
        )
    assert found["text"] == bytes(token for token in expected if token < 256).decode(errors="replace")
    assert "context of 80" in sample(run, "-p", "x" * 80).stderr


# --- what is kept, and shown


MARKUP = "<script>alert('x')</script> & <b>"


def test_samples_are_kept_and_shown_on_the_page(tmp_path: Path) -> None:
    run = saved_run(tmp_path)
    for _ in range(2):
        result = sample(run, "-p", MARKUP, "--tokens", "5", "--save", step=10)
        assert result.exit_code == 0, result.output
    (file,) = run.samples.iterdir()  # the same request replaces its file
    assert str(file) in result.stderr and file.name.startswith("step-00000010-")
    kept = SampleSet.model_validate_json(file.read_text())
    assert (kept.run, kept.step, kept.samples[0].prompt) == ("made", 10, MARKUP)
    assert file.stat().st_mode & 0o077 == 0  # `access = "owner"`
    page = run.report.read_text()
    assert "<h2>Samples</h2>" in page and "Step 10" in page
    assert "&lt;script&gt;alert" in page and "<script>alert" not in page
    listed = drawn(run, "-p", MARKUP, "--tokens", "5", "--save", step=20)
    assert len(list(run.samples.iterdir())) == 2 and listed
    assert run.report.read_text().index("Step 20") < run.report.read_text().index("Step 10")


def made_samples(step: int, texts: list[str]) -> SampleSet:
    samples = tuple(
        Sample(prompt=f"p{number}", text=text, tokens=1, ended="tokens") for number, text in enumerate(texts)
    )
    return SampleSet(
        run="r", step=step, time=1e9, temperature=0.5, top_k=3, top_p=0.9, seed=0, dtype="fp32", samples=samples
    )


def test_the_page_escapes_texts_and_stays_small(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "r")
    run.samples.mkdir(parents=True)
    for step in range(1, 9):
        made = made_samples(step, [f"<img src=x onerror=alert({step})>", "long " * 5000, "a", "b", "c"])
        (run.samples / made.file_name).write_text(made.model_dump_json())
    (run.samples / "step-00000099-00000000.json").write_text('{"step": "<i>"}')
    page = write_run_page(run).read_text()
    assert "<img" not in page and "&lt;img src=x onerror=alert(8)&gt;" in page
    assert page.count('class="sample"') == MAX_SHOWN and f"{8 * 5 - MAX_SHOWN} more in the run" in page
    assert "long " * 5000 not in page and len(page) < 20 * MAX_CHARACTERS + 60_000
    assert "temperature 0.5 · top-k 3 · top-p 0.9 · 1 tokens" in page
    assert "step-00000099-00000000.json has no samples that can be read" in page and "<i>" not in page
