"""The mean of checkpoints: equal to a plain loop over their tensors, and taken wherever a run is."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner, Result

from danlu.cli.app import app
from danlu.comm.world import World
from danlu.framework.decoder.decoder import Decoder
from danlu.framework.decoder.init_weights import init_weights
from danlu.framework.ema import ParameterEma
from danlu.framework.optimizer import build_optimizer
from danlu.framework.state import TrainState
from danlu.framework.weights import load_weights
from danlu.spec import RunFolder
from danlu.spec.load import load_model
from danlu.spec.problem import SpecError
from danlu.spec.recipe import BatchConfig, DataConfig, EmaConfig, OptimizerConfig, Recipe
from danlu.spec.toml import dumps
from danlu.storage.checkpoint import average
from danlu.storage.checkpoint.engine import open_checkpoint_engine
from danlu.storage.checkpoint.single_writer import source_tensor, write_checkpoint
from danlu.storage.store.base import open_store

MODEL = load_model("tiny-llama").model_copy(update={"layers": 1})
STEPS = (10, 20, 30)


def weights(step: int) -> dict[str, np.ndarray[Any, Any]]:
    generator = np.random.default_rng(step)
    return {
        "model.a": generator.normal(size=(7, 5)).astype(np.float32) * 1e3,
        "model.b": generator.normal(size=(3, 4, 2)).astype(np.float32),
        "model.c": generator.normal(size=()).astype(np.float32),
    }


@pytest.mark.parametrize("piece", [16, 64 << 20])
def test_every_element_is_the_mean_in_fp64_rounded_once(piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(average, "PIECE_BYTES", piece)
    store, target = open_store("memory://source"), open_store(f"memory://mean-{piece}")
    for step in STEPS:
        tensors = [source_tensor(name, "F32", array) for name, array in weights(step).items()]
        tensors.append(source_tensor("optimizer.a.exp_avg", "F32", np.ones((7, 5), np.float32)))
        tensors.append(source_tensor("model.count", "I64", np.array(4)))
        if f"step-{step:08d}" not in store.list():
            write_checkpoint(store, step, tensors, {"cursor": 8 * step, "seed": 3})
    read: list[int] = []
    manifest = average.average_checkpoints(store, STEPS, target, on_bytes=read.append)
    assert manifest.step == 30
    assert manifest.scalars["averaged"] == "10,20,30"
    assert set(manifest.tensors) == {"model.a", "model.b", "model.c", "model.count"}, "no optimizer states"
    assert sum(read) >= average.bytes_to_read(store, STEPS)
    made = average.CheckpointReader(target, 30)
    for name in weights(10):
        total = np.zeros_like(weights(10)[name], dtype=np.float64)
        for step in STEPS:
            total = total + weights(step)[name].astype(np.float64)
        expected = (total / 3).astype(np.float32)
        shape = expected.shape
        found = average.read_box_bits(made, name, ((0,) * len(shape), shape)).view(np.float32)
        np.testing.assert_array_equal(found, expected)


def test_checkpoints_of_different_models_have_no_mean() -> None:
    store = open_store("memory://different")
    for step, shape, count in ((1, (2, 3), 1), (2, (3, 2), 1), (3, (3, 2), 2)):
        tensors = [
            source_tensor("model.w", "F32", np.ones(shape, np.float32)),
            source_tensor("model.count", "I64", np.array(count)),
        ]
        write_checkpoint(store, step, tensors, {})
    with pytest.raises(average.CheckpointsDifferError, match=r"step 1 has with shape \[2, 3\] in F32 model.w"):
        average.average_checkpoints(store, (1, 2), open_store("memory://none"))
    with pytest.raises(average.CheckpointsDifferError, match=r"model\.count is I64 and differs"):
        average.average_checkpoints(store, (2, 3), open_store("memory://none"))
    with pytest.raises(average.CheckpointsDifferError, match=r"must have tensors named ema\.…, but has none"):
        average.average_checkpoints(store, (2, 3), open_store("memory://none"), prefix="ema.")


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    """A run with three checkpoints of a small model and of its moving average."""
    made = RunFolder(tmp_path / "runs" / "small")
    made.path.mkdir(parents=True)
    recipe = Recipe(
        name="small",
        steps=30,
        model=MODEL,
        data=DataConfig(shards="none"),
        batch=BatchConfig(sequences=1, length=8),
        ema=EmaConfig(decay=0.5),
    )
    made.recipe.write_text(dumps(recipe))
    engine = open_checkpoint_engine(str(made.checkpoints), keep=5, world=World())
    for step in STEPS:
        engine.save(step, _state(step).tensors(), {"step": step, "cursor": step, "seed": 0})
    engine.close()
    return made


def _state(seed: int) -> TrainState:
    decoder = Decoder(MODEL)
    init_weights([decoder], MODEL, seed)
    state = TrainState([decoder], build_optimizer([decoder], OptimizerConfig()), seed=0)
    state.ema = ParameterEma(0.5, state.named_parameters())
    for mean in state.ema.tensors.values():
        mean.fill_(float(seed))
    return state


def _run(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def _mean(steps: tuple[int, ...], name: str) -> torch.Tensor:
    return (
        torch.stack([dict(_state(step).named_parameters())[name].detach().double() for step in steps]).mean(0).float()
    )


def test_the_command_makes_a_run_that_weights_and_export_accept(run: RunFolder, tmp_path: Path) -> None:
    runs, output = ["--runs-dir", str(run.path.parent)], tmp_path / "runs" / "mean"
    result = _run("ckpt", "average", "small@15..30", "-o", str(output), *runs, "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["steps"] == [20, 30]
    loaded = Decoder(MODEL)
    load_weights([loaded], MODEL, output)
    for name, parameter in loaded.named_parameters():
        assert torch.equal(parameter.detach(), _mean((20, 30), name)), name
    exported = _run("export", "hf", "mean", "-o", str(tmp_path / "hf"), *runs, "--no-compare")
    assert exported.exit_code == 0, exported.output
    with pytest.raises(SpecError, match="weights of this model"):
        load_weights([loaded], MODEL.model_copy(update={"width": 128}), output)


def test_the_moving_average_is_exported_and_averaged_on_request(run: RunFolder, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    runs, output = ["--runs-dir", str(run.path.parent)], tmp_path / "hf"
    result = _run("export", "hf", "small@20", "-o", str(output), "--ema", "--no-compare", *runs)
    assert result.exit_code == 0, result.output
    tensors = {name: each for file in output.glob("*.safetensors") for name, each in load_file(file).items()}
    assert tensors and all(torch.equal(each, torch.full_like(each, 20.0)) for each in tensors.values())
    assert _run("ckpt", "average", "small@10..20", "-o", str(tmp_path / "mean"), "--ema", *runs).exit_code == 0
    loaded = Decoder(MODEL)
    load_weights([loaded], MODEL, tmp_path / "mean")
    assert all(torch.equal(each, torch.full_like(each, 15.0)) for each in loaded.parameters())


def test_what_cannot_be_averaged_is_said(run: RunFolder, tmp_path: Path) -> None:
    runs = ["--runs-dir", str(run.path.parent)]
    for asked, said in (
        ("small@20", "name a run and two steps, such as small@100..200"),
        ("small@11..20", "at least 2 checkpoints from 11 to 20, but there are 1; saved are 10, 20, 30"),
    ):
        result = _run("ckpt", "average", asked, "-o", str(tmp_path / "out"), *runs)
        assert result.exit_code == 2
        assert said in result.stderr
        assert not (tmp_path / "out").exists()
    (tmp_path / "there").mkdir()
    result = _run("ckpt", "average", "small@10..30", "-o", str(tmp_path / "there"), *runs)
    assert result.exit_code == 2 and "must be new" in result.stderr
    run.recipe.write_text(run.recipe.read_text().replace("[ema]\ndecay = 0.5\n", ""))
    result = _run("export", "hf", "small", "-o", str(tmp_path / "hf"), "--ema", *runs)
    assert "keeps no average" in str(result.exception)
