import json
import mmap
import platform
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from typer.testing import CliRunner

from danlu.chips import ChipDescriptor, ChipError, device_benchmark, find_chip, host, list_chips
from danlu.chips.accelerator import AcceleratorRuntime, find_data_sheet, nccl_support
from danlu.chips.cpu import CpuRuntime, gloo_support
from danlu.chips.cuda import DATA_SHEETS as NVIDIA
from danlu.chips.cuda import describe as describe_cuda
from danlu.chips.device_benchmark import (
    MeasurementError,
    measure_disk_speed,
    measure_matmul_flops,
    measure_memory_bandwidth,
)
from danlu.chips.health import DeviceSelfTest, check_matmul
from danlu.chips.rocm import DATA_SHEETS as AMD
from danlu.chips.rocm import describe as describe_rocm

CPU = torch.device("cpu")

FAKE = """
from danlu.chips import ChipDescriptor
from danlu.chips.cpu import CpuRuntime

def describe():
    return ChipDescriptor(name="{name}", runtime=CpuRuntime(), version={version})

def broken():
    raise ImportError("libmychip.so is missing")

def nothing():
    return "a chip"
"""

AddChip = Callable[..., None]


@pytest.fixture
def add_chip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AddChip:
    """Install a third-party chip package: a module and the metadata pip would write."""

    def add(
        entry: str, function: str = "describe", name: str = "", version: int = 1, package: str = "fakechip"
    ) -> None:
        folder = tmp_path / package
        info = folder / f"{package}-1.0.dist-info"
        info.mkdir(parents=True)
        (folder / f"{package}.py").write_text(FAKE.format(name=name or entry, version=version))
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[danlu.chips]\n{entry} = {package}:{function}\n")
        monkeypatch.delitem(sys.modules, package, raising=False)
        monkeypatch.syspath_prepend(folder)

    return add


# --- discovery


def test_danlus_own_chips_are_found_by_entry_point() -> None:
    assert list(list_chips()) == ["ascend", "cpu", "cuda", "rocm"]


def test_a_third_party_chip_is_found_and_comes_before_the_cpu(add_chip: AddChip) -> None:
    add_chip("mychip")
    assert find_chip("mychip").name == "mychip"
    assert find_chip().name == "mychip"
    assert list(find_chip("mychip").missing_providers()) == [
        "capabilities",
        "collectives",
        "health",
        "telemetry",
        "scheduler",
    ]


@pytest.mark.parametrize(
    ("kwargs", "reason"),
    [
        ({"function": "broken"}, "ImportError: libmychip.so is missing"),
        ({"function": "nothing"}, "returned str"),
        ({"function": "absent"}, "AttributeError"),
        ({"version": 2}, "must be of version 1, but is of 2"),
        ({"name": "other"}, 'is named "other"'),
    ],
)
def test_a_chip_that_fails_to_load_is_reported_and_the_rest_work(
    add_chip: AddChip, kwargs: dict[str, str], reason: str
) -> None:
    add_chip("mychip", **kwargs)
    with pytest.warns(RuntimeWarning, match=reason):
        assert "mychip" not in list_chips()
    with pytest.warns(RuntimeWarning, match=reason):
        find_chip()
    assert find_chip("cpu").name == "cpu"  # asked for by name: the broken one is none of its business
    with pytest.raises(ChipError, match=reason):
        find_chip("mychip")


def test_two_packages_with_one_name_are_reported(add_chip: AddChip) -> None:
    add_chip("cpu", package="another")
    with pytest.warns(RuntimeWarning, match="declared by both danlu and another: danlu is used"):
        assert list_chips()["cpu"].collectives is not None


def test_an_unknown_chip_names_the_nearest() -> None:
    with pytest.raises(ChipError, match=r"(?s)\"rocn\" is not a chip .*did you mean `rocm`"):
        find_chip("rocn")


def test_a_source_tree_without_metadata_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> None:
        raise registry.metadata.PackageNotFoundError(name)

    from danlu.chips import registry

    monkeypatch.setattr(registry.metadata, "distribution", absent)
    with pytest.raises(ChipError, match="pip install -e"):
        list_chips()


# --- CPU


def test_the_cpu_descriptor_is_complete() -> None:
    chip = find_chip("cpu")
    assert chip.missing_providers() == {}
    assert chip.runtime.unavailable_reason() == ""
    assert chip.runtime.set_device(7) == CPU
    assert 1 <= chip.runtime.device_count() <= 100_000
    assert chip.capabilities is not None and chip.capabilities.data_sheet() is None


def test_seeding_repeats_the_numbers() -> None:
    runtime = CpuRuntime()
    runtime.seed(3)
    first = torch.rand(4)
    runtime.seed(3)
    assert torch.equal(first, torch.rand(4))


def test_peak_memory_sees_an_allocation_and_keeps_it() -> None:
    runtime = CpuRuntime()
    size = host.peak_resident_memory() - host.resident_memory() + 64 * 2**20  # enough to pass any earlier peak
    before = runtime.max_memory()
    with mmap.mmap(-1, size) as held:  # not from the C library, which may have kept what others freed
        torch.frombuffer(held, dtype=torch.uint8).fill_(1)
        peak = runtime.max_memory()
    assert before + 32 * 2**20 <= peak <= runtime.memory_total()
    assert runtime.max_memory() >= peak - 2**20  # the kernel counts in batches of pages, a few of them late


_FAULTS = """
import resource, sys, torch
from danlu.chips import find_chip

if sys.argv[1] == "rank":
    find_chip("cpu").runtime.set_device(0)

def step():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    kept = [torch.ones(1_000_000 * size) for size in range(10, 14)]
    del kept
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

print(min(step() for _ in range(8)))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc can be told to keep what is freed")
def test_a_rank_keeps_the_memory_it_frees_for_its_next_step() -> None:
    """Tensors of 40 MB and more, which are 45,000 pages in all, are asked for again and again."""
    bare, rank = (
        int(subprocess.run([sys.executable, "-c", _FAULTS, who], capture_output=True, text=True, check=True).stdout)
        for who in ("bare", "rank")
    )
    assert rank < 0.1 * bare


def test_a_c_library_that_keeps_nothing_is_told_with_its_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("danlu.chips.cpu._keep_freed_memory", lambda: False)
    with pytest.warns(UserWarning, match="every step faults its memory in again"):
        CpuRuntime().set_device(0)


def test_telemetry_reads_the_kernel() -> None:
    chip = find_chip("cpu")
    assert chip.telemetry is not None
    figures = chip.telemetry.read()
    assert figures["load_per_core"] >= 0
    assert 2**20 < figures["resident"] < chip.runtime.memory_total()
    assert 0 < figures["memory_available"] <= chip.runtime.memory_total()


def test_gloo_says_what_it_lacks_and_what_to_do() -> None:
    collectives = gloo_support()
    assert collectives.unsupported_reason("all_reduce", "bf16", "avg") == ""
    assert "sum, then divide" in collectives.unsupported_reason("all_reduce", "int64", "avg")
    assert collectives.unsupported_reason("all_gather", "int64", "avg") == ""  # gathers reduce nothing
    assert "view the tensor as uint8" in collectives.unsupported_reason("all_gather", "fp8")
    assert collectives.emulated == {"reduce_scatter"}
    assert nccl_support().unsupported_reason("all_gather", "fp8") == ""
    assert nccl_support().unsupported_reason("reduce_scatter", "fp8") != ""


# --- host facts of another machine


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_hyper_threads_count_once_and_a_container_quota_counts(tmp_path: Path) -> None:
    siblings = "sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
    root = write(tmp_path, {siblings.format(cpu): f"{cpu % 4},{cpu % 4 + 4}\n" for cpu in range(8)})
    assert host.physical_cores(root, usable=set(range(8))) == 4
    assert host.physical_cores(root, usable={0, 4, 1}) == 2
    write(root, {"sys/fs/cgroup/cpu.max": "250000 100000\n"})
    assert host.physical_cores(root, usable=set(range(8))) == 2
    write(root, {"sys/fs/cgroup/cpu.max": "50000 100000\n"})
    assert host.physical_cores(root, usable=set(range(8))) == 1
    write(root, {"sys/fs/cgroup/cpu.max": "max 100000\n"})
    assert host.physical_cores(root, usable=set(range(8))) == 4


def test_memory_is_the_containers_where_that_is_less(tmp_path: Path) -> None:
    root = write(tmp_path, {"proc/meminfo": "MemTotal:       1000 kB\nMemAvailable:    600 kB\n"})
    assert host.memory_total(root) == 1_024_000
    assert host.memory_available(root) == 614_400
    write(root, {"sys/fs/cgroup/memory.max": "500000\n", "sys/fs/cgroup/memory.current": "400000\n"})
    assert host.memory_total(root) == 500_000
    assert host.memory_available(root) == 100_000


def test_caches_cards_and_names(tmp_path: Path) -> None:
    cache = "sys/devices/system/cpu/cpu0/cache"
    root = write(tmp_path, {f"{cache}/index0/size": "48K\n", f"{cache}/index3/size": "32M\n"})
    assert host.last_level_cache(root) == 32 * 2**20
    assert host.rdma_devices(root) == ()
    write(
        root, {"sys/class/infiniband/mlx5_0/x": "", "proc/cpuinfo": "processor : 0\nmodel name\t: Some CPU @ 2 GHz\n"}
    )
    assert host.rdma_devices(root) == ("mlx5_0",)
    assert host.cpu_name(root) == "Some CPU @ 2 GHz"


# --- health


def test_a_healthy_device_passes() -> None:
    findings = DeviceSelfTest(CpuRuntime(), lambda: CpuRuntime().memory_total()).run_checks(0)
    assert [finding.check for finding in findings] == ["matmul float32", "matmul bfloat16", "memory"]
    assert all(finding.healthy for finding in findings), findings


def flip_one_exponent_bit(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    result = (left @ right).float()
    result.view(torch.int32)[17, 5] ^= 1 << 24
    return result


def give_nan(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    result = left @ right
    result[0, 0] = float("nan")
    return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("product", [flip_one_exponent_bit, give_nan])
def test_a_device_that_reckons_wrongly_is_found(
    dtype: torch.dtype, product: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
) -> None:
    assert not check_matmul(CPU, dtype, product).healthy


def test_a_full_device_is_found() -> None:
    assert not DeviceSelfTest(CpuRuntime(), lambda: 2**20).run_checks(0)[-1].healthy


# --- accelerators, with the build and the devices of another machine


def pretend(monkeypatch: pytest.MonkeyPatch, device: str | None, count: int = 0, **versions: str | None) -> list[int]:
    """Make PyTorch look as if built and equipped so; returns the list of indices made current."""
    chosen: list[int] = []
    for name in ("cuda", "hip"):
        monkeypatch.setattr(torch.version, name, versions.get(name))
    found = torch.device(device) if device else None
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: found)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: count)
    monkeypatch.setattr(torch.accelerator, "set_device_index", chosen.append)
    return chosen


@pytest.mark.parametrize("name", ["cuda", "rocm", "ascend"])
def test_an_accelerator_that_is_not_here_says_why(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, None)
    monkeypatch.setattr("danlu.chips.ascend.find_spec", lambda name: None)
    runtime = list_chips()[name].runtime
    assert not runtime.is_available()
    assert "install" in runtime.unavailable_reason()
    assert runtime.device_count() == 0
    with pytest.raises(ValueError, match="below the 0"):
        runtime.set_device(0)
    with pytest.raises(ChipError, match=f'"{name}" is not available: .*install'):
        find_chip(name)
    assert find_chip().name == "cpu"


def test_a_build_without_a_device_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, None, cuda="12.8")
    assert "sees no cuda device" in describe_cuda().runtime.unavailable_reason()


@pytest.mark.parametrize(("versions", "here"), [({"cuda": "12.8"}, "cuda"), ({"hip": "6.4"}, "rocm")])
def test_cuda_and_rocm_are_told_apart_by_the_build(
    versions: dict[str, str], here: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = pretend(monkeypatch, "cuda", count=2, **versions)
    available = [chip.name for chip in (describe_cuda(), describe_rocm()) if chip.runtime.is_available()]
    assert available == [here]
    chip = find_chip()
    assert chip.name == here
    assert chip.runtime.set_device(1) == torch.device("cuda", 1)
    assert chosen == [1]
    with pytest.raises(ValueError, match="below the 2 cuda devices seen here, but is 2"):
        chip.runtime.set_device(2)


def test_ascend_is_here_when_its_extension_and_device_are(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = AcceleratorRuntime("xpu", lambda: "")  # a type every build can name stands for the extension's
    pretend(monkeypatch, "xpu", count=8)
    assert runtime.is_available() and runtime.device_count() == 8
    pretend(monkeypatch, "cuda", count=8)
    assert not runtime.is_available()


def test_scheduler_names_differ() -> None:
    names = {name: chip.scheduler for name, chip in list_chips().items()}
    assert {name: scheduler.slurm for name, scheduler in names.items() if scheduler} == {
        "ascend": "npu",
        "cpu": "",
        "cuda": "gpu",
        "rocm": "gpu",
    }


def test_data_sheets_are_found_by_the_drivers_name() -> None:
    sheet = find_data_sheet("NVIDIA H100 80GB HBM3", NVIDIA)
    assert sheet is not None and sheet.peak["bf16"] == pytest.approx(989.5e12)
    assert find_data_sheet("NVIDIA GeForce RTX 4090", NVIDIA) is None
    sheet = find_data_sheet("AMD Instinct MI300X", AMD)
    assert sheet is not None and sheet.kind == "rocm"
    for chip in (*NVIDIA.values(), *AMD.values()):
        assert not chip.measured
        assert chip.peak["fp64"] <= chip.peak["fp32"] < chip.peak["bf16"] == chip.peak["fp16"]


# --- measures of one device


def test_peaks_and_bandwidth_are_plausible() -> None:
    assert measure_matmul_flops(CPU, torch.float32, seconds=0.1) > 1e9
    assert measure_memory_bandwidth(CPU, seconds=0.05, sharers=8) > 1e8


def test_a_peak_counts_what_torch_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a clock that says one second a product, the rate is its operations."""
    counted: list[int] = []

    def one_second(run: Callable[[], object], _device: torch.device, _seconds: float) -> float:
        with FlopCounterMode(display=False) as counter:
            run()
        counted.append(counter.get_total_flops())
        return 1.0

    monkeypatch.setattr(device_benchmark, "_mean_seconds", one_second)
    assert measure_matmul_flops(CPU, torch.float32, seconds=0.1) == counted[-1] > 0


def test_a_type_without_a_product_says_so() -> None:
    with pytest.raises(MeasurementError, match="a bool matmul of 256×256 does not run on cpu"):
        measure_matmul_flops(CPU, torch.bool, seconds=0.1)


def test_the_disk_is_measured_and_left_clean(tmp_path: Path) -> None:
    speed = measure_disk_speed(tmp_path, size=16 * 2**20, seconds=1.0)
    assert speed.read > 0 and speed.write > 0 and speed.free > 0
    assert ("direct" in speed.method) == speed.used_direct_io
    assert list(tmp_path.iterdir()) == []


def test_a_file_system_without_direct_io_is_measured_buffered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("danlu.chips.device_benchmark._O_DIRECT", 0)
    speed = measure_disk_speed(tmp_path, size=16 * 2**20, seconds=1.0)
    assert not speed.used_direct_io and "buffered" in speed.method
    assert speed.read > 0 and speed.write > 0


def test_a_disk_without_room_says_so(tmp_path: Path) -> None:
    with pytest.raises(MeasurementError, match="MB free, but"):
        measure_disk_speed(tmp_path, size=2**60)


# --- danlu chips


def test_the_command_lists_every_chip_for_machines_and_people() -> None:
    from danlu.cli.app import app

    machine = CliRunner().invoke(app, ["chips", "--json"])
    rows = {row["name"]: row for row in json.loads(machine.stdout)}
    assert list(rows) == list(list_chips())
    assert rows["cpu"]["available"] and rows["cpu"]["memory"] == host.memory_total()
    assert all(row["available"] == (row["why_not"] == "") for row in rows.values())
    person = CliRunner().invoke(app, ["chips"])
    assert person.exit_code == 0
    assert all(name in person.stdout for name in rows)


def test_descriptors_are_frozen() -> None:
    with pytest.raises(AttributeError):
        find_chip("cpu").name = "gpu"  # type: ignore[misc]
    assert isinstance(find_chip("cpu"), ChipDescriptor)
