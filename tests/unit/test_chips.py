import json
import mmap
import platform
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from typer.testing import CliRunner

from danlu.chips import ChipDescriptor, ChipError, device_benchmark, find_chip, host, list_chips
from danlu.chips.accelerator import AcceleratorRuntime
from danlu.chips.cpu import CpuRuntime
from danlu.chips.cuda import describe as describe_cuda
from danlu.chips.device_benchmark import (
    MeasurementError,
    measure_disk_speed,
    measure_matmul_flops,
    measure_memory_bandwidth,
)
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
    assert find_chip("mychip").backend is None


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
        assert list_chips()["cpu"].backend == "gloo"


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
    assert chip.backend == "gloo"
    assert chip.runtime.device_name() == host.cpu_name()
    assert chip.runtime.unavailable_reason() == ""
    assert chip.runtime.set_device(7) == CPU
    assert 1 <= chip.runtime.device_count() <= 100_000


def test_peak_memory_sees_an_allocation_and_keeps_it() -> None:
    runtime = CpuRuntime()
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE
    size = host.peak_resident_memory() - resident + 64 * 2**20  # enough to pass any earlier peak
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


@pytest.mark.full
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
    root = write(tmp_path, {"proc/meminfo": "MemTotal:       1000 kB\n"})
    assert host.memory_total(root) == 1_024_000
    write(root, {"sys/fs/cgroup/memory.max": "500000\n"})
    assert host.memory_total(root) == 500_000


def test_caches_and_names(tmp_path: Path) -> None:
    cache = "sys/devices/system/cpu/cpu0/cache"
    root = write(tmp_path, {f"{cache}/index0/size": "48K\n", f"{cache}/index3/size": "32M\n"})
    assert host.last_level_cache(root) == 32 * 2**20
    write(root, {"proc/cpuinfo": "processor : 0\nmodel name\t: Some CPU @ 2 GHz\n"})
    assert host.cpu_name(root) == "Some CPU @ 2 GHz"


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


def test_a_device_has_the_name_its_driver_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = SimpleNamespace(get_device_name=lambda: "Some Chip 80GB")
    monkeypatch.setattr(torch, "get_device_module", lambda kind: driver if kind == "reporting" else SimpleNamespace())
    assert AcceleratorRuntime("reporting", lambda: "").device_name() == "Some Chip 80GB"
    assert AcceleratorRuntime("silent", lambda: "").device_name() == "silent"


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
