"""The peak that MFU is computed against: the best of many short measurements, kept for the machine."""

import os
import stat
from pathlib import Path

import pytest
import torch
from made_runs import append, make_run, started, step

from danlu.chips import device_benchmark
from danlu.comm.world import World
from danlu.report.run_history import read_run_history

SLOW, FAST = (330e9, 360e9, 350e9), (700e9, 740e9, 720e9)
HERE = "atlas, cpu, a processor, fp32, 1 ranks × 2 threads on 2 cores, torch 2.11"


def test_two_runs_on_one_machine_are_held_against_the_same_peak(tmp_path: Path) -> None:
    """A busy start after a quiet one took half the peak, so that the slower run showed the higher MFU."""
    from danlu.chips.peak_cache import update_peak_cache

    file = tmp_path / "danlu" / "peaks.json"
    quiet, busy = update_peak_cache(file, HERE, FAST), update_peak_cache(file, HERE, SLOW)
    assert quiet.best == busy.best == 740e9
    assert quiet.spread == pytest.approx(1 - 700 / 740)
    assert busy.spread == pytest.approx(1 - 330 / 740)
    shares = []
    for number, peak in enumerate((quiet, busy)):
        run = make_run(tmp_path / f"run{number}")
        append(run, [started(peak=peak.best, peak_spread=peak.spread), *(step(each) for each in (1, 2, 3))])
        shares.append(read_run_history(run).mfu)
    assert shares[0] == shares[1]


def test_what_is_kept_is_private_and_of_one_machine_and_precision(tmp_path: Path) -> None:
    from danlu.chips.peak_cache import MAX_RATES, update_peak_cache

    file = tmp_path / "danlu" / "peaks.json"
    update_peak_cache(file, HERE, FAST)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    assert update_peak_cache(file, HERE.replace("fp32", "bf16"), SLOW).best == 360e9
    for _ in range(MAX_RATES):
        found = update_peak_cache(file, HERE, SLOW)
    assert found.best == 360e9  # what the machine once reached and reaches no more is forgotten
    assert len(found.rates) == MAX_RATES
    assert [path.name for path in file.parent.iterdir()] == ["peaks.json"]


@pytest.mark.parametrize(
    "text", ["", "{", "[1]", f'{{"{HERE}": 3}}', f'{{"{HERE}": ["x"]}}', f'{{"{HERE}": [NaN]}}', f'{{"{HERE}": [-1]}}']
)
def test_a_file_that_is_broken_costs_the_memory_not_the_run(tmp_path: Path, text: str) -> None:
    from danlu.chips.peak_cache import update_peak_cache

    file = tmp_path / "peaks.json"
    file.write_text(text)
    assert update_peak_cache(file, HERE, SLOW).rates == SLOW
    assert update_peak_cache(file, HERE, SLOW).rates == (*SLOW, *SLOW)
    assert update_peak_cache(tmp_path / "peaks.json" / "below", HERE, SLOW).rates == SLOW  # no folder to write to
    assert update_peak_cache(None, HERE, SLOW).rates == SLOW


def test_several_rounds_are_measured_and_the_best_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch.distributed as dist

    from danlu.comm import peak_flops

    rates = iter([3e11, 7e11, 2e11, 5e11, 4e11])
    monkeypatch.setattr(peak_flops, "matmul_flops", lambda *_: next(rates))
    monkeypatch.setattr(peak_flops, "best_matmul_size", lambda *_: 256)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        cache = peak_flops.PeakCacheKey(tmp_path / "peaks.json", "cpu", "fp32", 0)
        found = peak_flops.measure_peak(World.adopt(), torch.float32, cache)
    finally:
        dist.destroy_process_group()
    assert found.best == pytest.approx(7e11)
    assert found.spread == pytest.approx(5 / 7)
    assert "fp32, 1 ranks" in (tmp_path / "peaks.json").read_text()
    assert os.uname().nodename in (tmp_path / "peaks.json").read_text()


def test_the_cache_lies_where_the_user_s_caches_lie() -> None:
    from danlu.cli.worker import peak_cache_path

    assert peak_cache_path({"XDG_CACHE_HOME": "/c", "HOME": "/h"}) == Path("/c/danlu/peaks.json")
    assert peak_cache_path({"HOME": "/h"}) == Path("/h/.cache/danlu/peaks.json")
    assert peak_cache_path({}) is None
    assert peak_cache_path({"XDG_CACHE_HOME": "relative"}) is None


def test_the_side_is_one_of_those_that_are_tried() -> None:
    assert device_benchmark.best_matmul_size(torch.device("cpu"), torch.float32, 0.02) in device_benchmark._MATMUL_SIZES
