"""A run's data while the run's disk is full."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from danlu.comm.mesh import build_mesh
from danlu.comm.rendezvous import RankInfo, rendezvous
from danlu.comm.world import World
from danlu.framework.train_data import TrainData
from danlu.spec import Plan, RunFolder, load_recipe
from danlu.storage.data.build import build_dataset
from danlu.storage.data.tokenizer import BytesTokenizer


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    place = tmp_path / "disk"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(place)], check=True)
    yield place
    subprocess.run(["umount", "--lazy", str(place)], check=True)


def test_data_that_cannot_be_promised_waits_and_the_run_goes_on(tmp_path: Path, small_disk: Path) -> None:
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 50)
    build_dataset([str(tmp_path / "text.txt")], tmp_path / "shards", BytesTokenizer())
    (tmp_path / "recipe.toml").write_text(
        f'name = "x"\nsteps = 2\nmodel = {{ base = "tiny-llama", vocabulary = 264 }}\n'
        f'data = {{ shards = "{tmp_path / "shards"}" }}\nbatch = {{ sequences = 4, length = 16 }}\n'
    )
    world = World.join(RankInfo(), "gloo", rendezvous(RankInfo()))
    try:
        mesh = build_mesh(Plan(), World.adopt(), None, experts=False)
        run = RunFolder(small_disk)
        supply = TrainData(run, load_recipe(tmp_path / "recipe.toml"), mesh, 0)
        before = list(supply.dataset.version_schedule)
        run.data.unlink()  # so that there is something to promise
        (small_disk / "ballast").write_bytes(bytes(64 << 10))
        supply.refresh(8)
        assert supply.dataset.version_schedule == before
        (warning,) = supply.pop_warnings()
        assert "not read yet" in warning and "No space left" in warning
    finally:
        world.shutdown()
