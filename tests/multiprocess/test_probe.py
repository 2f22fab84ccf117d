import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from danlu.chips.device_benchmark import MeasurementError
from danlu.comm.collective_benchmark import OPERATIONS, CollectiveFit, bus_bandwidth_factor, fit_line, ring_steps
from danlu.comm.rank_benchmark import QUICK, measure_local_ranks, measurement_names
from danlu.cost import ParallelLayout, Predictor
from danlu.spec import Cluster, Model, load_cluster
from danlu.spec.recipe import BatchConfig

# --- the arithmetic


def test_a_line_is_recovered_exactly() -> None:
    sizes = [1024 * 4**power for power in range(9)]
    alpha, beta = fit_line(sizes, [50e-6 + size / 2e9 for size in sizes])
    assert alpha == pytest.approx(50e-6)
    assert 1 / beta == pytest.approx(2e9)


def test_small_sizes_fix_the_latency_even_when_large_ones_are_noisy() -> None:
    sizes = [1024 * 4**power for power in range(9)]
    seconds = [50e-6 + size / 2e9 for size in sizes]
    seconds[-1] *= 1.2  # 6.7 ms of noise on the largest, against 50 µs to be found
    alpha, beta = fit_line(sizes, seconds)
    assert alpha == pytest.approx(50e-6, rel=0.1)
    assert 1 / beta == pytest.approx(2e9, rel=0.15)


def test_neither_latency_nor_slope_falls_below_zero() -> None:
    alpha, beta = fit_line([1000, 2000], [1e-6, 3e-6])
    assert alpha == 0 and beta > 0
    assert fit_line([1000, 2000], [3e-6, 3e-6 - 1e-9])[1] == 0
    with pytest.raises(ValueError, match="two or more pairs"):
        fit_line([1000], [1.0])


def test_a_fit_without_a_slope_still_has_a_bandwidth() -> None:
    sizes, seconds = (1024, 4096), (3e-6, 2e-6)
    latency, per_byte = fit_line(sizes, seconds)
    fit = CollectiveFit(
        operation="p2p",
        level="node",
        ranks=2,
        latency=latency,
        per_byte=per_byte,
        error=0.2,
        sizes=sizes,
        seconds=seconds,
    )
    assert fit.per_byte == 0 and fit.bus_bandwidth == pytest.approx(4096 / 2e-6)


def test_what_a_ring_sends() -> None:
    assert [bus_bandwidth_factor(operation, 4) for operation in OPERATIONS] == [1.5, 0.75, 0.75, 0.75, 1.0]
    assert [ring_steps(operation, 4) for operation in OPERATIONS] == [6, 3, 3, 3, 1]


# --- real ranks


@pytest.mark.full  # a minute, of which most is the chip
def test_the_probe_writes_a_cluster_that_loads_and_is_plausible(tmp_path: Path) -> None:
    file = tmp_path / "cluster.toml"
    command = [sys.executable, "-m", "danlu", "probe", "--quick", "--ranks", "2", "--json", "-o", str(file)]
    done = subprocess.run([*command, "--disk", str(tmp_path)], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr
    answer = json.loads(done.stdout)
    cluster = load_cluster(str(file))
    assert cluster == Cluster.model_validate(answer["cluster"])
    assert list(tmp_path.iterdir()) == [file]

    chip, level = cluster.chip, cluster.levels[0]
    assert chip.measured and chip.kind == "cpu"
    assert chip.peak["fp32"] > 1e9 and chip.peak["bf16"] > 1e9
    assert 1e8 < chip.memory_bandwidth < 1e13
    assert cluster.chips == 2
    assert 1e6 < level.bandwidth < 1e12
    assert 0 < level.latency < 0.1
    assert {tier.name: tier.kind for tier in cluster.tiers} == {"memory": "memory", "disk": "local"}
    assert [fit["operation"] for fit in answer["ranks"]["fits"]] == list(OPERATIONS)


@pytest.mark.full  # two probes, a minute each
def test_a_chip_that_is_known_is_not_measured_again(tmp_path: Path) -> None:
    file = tmp_path / "cluster.toml"
    command = [sys.executable, "-m", "danlu", "probe", "--quick", "--ranks", "2", "--json", "-o", str(file)]
    subprocess.run(command, capture_output=True, timeout=600, check=True)
    cluster = load_cluster(str(file))
    again = subprocess.run([*command, "--chip-from", str(file)], capture_output=True, text=True, timeout=600)
    assert again.returncode == 0, again.stderr
    answer = json.loads(again.stdout)
    assert answer["ranks"]["operators"] == {}, "they take most of the time, and are known"
    probed = Cluster.model_validate(answer["cluster"])
    assert probed.chip == cluster.chip and probed.levels != cluster.levels
    assert f"The chip's figures are those of {file}." in probed.source


def test_one_rank_has_no_network_and_is_still_measured() -> None:
    begun: list[str] = []
    effort = QUICK.model_copy(update={"peak": 0.1, "memory": 0.05})
    figures = measure_local_ranks("cpu", 1, 1, effort, begun.append)
    assert figures.fits == () and figures.peak["fp32"] > 1e9
    assert tuple(begun) == measurement_names((("node", 1),), effort)


def test_a_rank_that_fails_is_named_with_its_reason() -> None:
    with pytest.raises(MeasurementError, match=r'rank [01]: ChipError: "nochip" is not a chip'):
        measure_local_ranks("nochip", 2, 1, QUICK)


@pytest.mark.parametrize(
    "options",
    [
        ["--disk", "absent"],
        ["-o", "absent/cluster.toml"],
        ["--chip", "nochip"],
        ["--chip-from", "absent.toml"],
        ["--chip-from", "h100-pod", "--ranks", "1"],
    ],
)
def test_what_the_user_can_mend_ends_without_a_traceback(tmp_path: Path, options: list[str]) -> None:
    command = [sys.executable, "-m", "danlu", "probe", "--quick", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=360, cwd=tmp_path)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert options[1].split("/")[0] in done.stderr


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--rank", "0"], "--rank has no effect without --ranks"),
        (["--rdzv-endpoint", "localhost:1"], "--rdzv-endpoint has no effect without --rank"),
        (
            ["--rank", "2", "--ranks", "2", "--rdzv-endpoint", "localhost:1", "--levels", "node:2"],
            "must be below --ranks 2",
        ),
        (
            ["--rank", "0", "--ranks", "2", "--rdzv-endpoint", "localhost:1", "--levels", "node"],
            '"node" must be a name',
        ),
        (
            ["--rank", "0", "--ranks", "2", "--rdzv-endpoint", "localhost:1", "--levels", "node:3"],
            "must hold all 2 ranks",
        ),
    ],
)
def test_a_place_in_a_cluster_must_be_whole(tmp_path: Path, options: list[str], said: str) -> None:
    command = [sys.executable, "-m", "danlu", "probe", "--quick", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=360, cwd=tmp_path)
    assert done.returncode == 2
    assert said in done.stderr and "Traceback" not in done.stderr


@pytest.mark.full
def test_ranks_started_apart_measure_the_levels_between_them(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        store = f"127.0.0.1:{taken.getsockname()[1]}"
    file = tmp_path / "cluster.toml"
    common = [sys.executable, "-m", "danlu", "probe", "--quick", "--ranks", "2", "--threads", "1", "-o", str(file)]
    common += ["--disk", str(tmp_path), "--rdzv-endpoint", store, "--levels", "node:1,fabric:2"]
    ranks = [
        subprocess.Popen([*common, "--rank", str(rank)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    told = [rank.communicate(timeout=600)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], told
    cluster = load_cluster(str(file))
    assert [(level.name, level.fanout) for level in cluster.levels] == [("node", 1), ("fabric", 2)]
    assert not cluster.levels[0].collectives
    assert [found.operation for found in cluster.levels[1].collectives] == list(OPERATIONS)
    assert not cluster.chip.overlaps and cluster.chip.alone >= 1
    assert cluster.chip.spread is not None and 0 <= cluster.chip.spread < 1
    assert set(cluster.chip.operators) == {"fp32", "bf16"}
    model = Model(vocabulary=512, layers=2, width=256, heads=4, sequence=256)
    step = Predictor(model, BatchConfig(sequences=4, length=256), cluster, dtype="fp32").predict(
        ParallelLayout(shard=2, reshard_after_forward=True)
    )
    assert 1e-3 < step.seconds < 100 and not step.assumptions


CLUSTER = """
name = "two"
[chip]
name = "core"
kind = "cpu"
memory = "1 GB"
memory_bandwidth = "1 GB/s"
peak = { fp32 = "1 GFLOP/s" }
[[levels]]
name = "board"
fanout = 2
bandwidth = "1 GB/s"
latency = "1 us"
"""


def danlu(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "danlu", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=folder)


FURTHER = """
[[levels]]
name = "fabric"
fanout = 2
bandwidth = "1 GB/s"
latency = "1 us"
[[levels.collectives]]
operation = "p2p"
ranks = 2
sizes = [1000, 2000]
seconds = [1, 2]
"""


def test_algorithms_are_measured_into_a_cluster_file_and_shown(tmp_path: Path) -> None:
    (tmp_path / "two.toml").write_text(CLUSTER + FURTHER)
    tuned = danlu(tmp_path, "comm", "tune", "two.toml", "--ranks", "2", "--quick", "-o", "tuned.toml", "--json")
    assert tuned.returncode == 0, tuned.stderr
    level, further = load_cluster(str(tmp_path / "tuned.toml")).levels
    assert further == load_cluster(str(tmp_path / "two.toml")).levels[1], "what these ranks do not reach stays"
    assert {(each.operation, each.algorithm) for each in level.collectives} == {
        *((operation, algorithm) for operation in OPERATIONS[:4] for algorithm in ("library", "memory")),
        ("p2p", "default"),
    }
    shown = danlu(tmp_path, "comm", "show", "tuned.toml", "--json")
    assert json.loads(shown.stdout) == json.loads(tuned.stdout)
    assert {row["operation"] for row in json.loads(shown.stdout)} == set(OPERATIONS[:4])
    assert "all-reduce" in danlu(tmp_path, "comm", "show", "tuned.toml").stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("show", "two.toml"), "has no measured algorithms"),
        (("tune", "two.toml", "--ranks", "3"), "must be at most the 2 chips"),
        (("tune", "h100-pod", "--ranks", "16"), "are on several nodes"),
        (("tune", "h100-pod", "--ranks", "24560"), "must fill the levels"),
        (("tune", "two.toml", "-o", "absent/x.toml"), "absent does not exist"),
        (("tune", "two.toml", "--rank", "0", "--rdzv-endpoint", "nowhere"), "host:port"),
    ],
)
def test_what_cannot_be_tuned_is_refused_in_words(tmp_path: Path, words: tuple[str, ...], said: str) -> None:
    (tmp_path / "two.toml").write_text(CLUSTER)
    done = danlu(tmp_path, "comm", *words)
    assert done.returncode == 2 and said in done.stderr and "Traceback" not in done.stderr
