"""Texts that no writer wrote: refused as damaged, quickly, in little memory, nothing outside the folder touched."""

import hashlib
import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
from fuzzing import FOLDER, LONGEST, STEP, Fuzzed, Outside, Target, fuzz, mutated, raw_change, read_back, valid
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from made_checkpoints import attempt_of

from danlu.storage.checkpoint.manifest import (
    MANIFEST_FILE,
    CorruptCheckpointError,
    Leaf,
    Manifest,
    TreeNode,
    parse_manifest,
    parse_metadata,
)
from danlu.storage.checkpoint.reader import CheckpointReader
from danlu.storage.store.memory_store import MemoryStore

FILES = {2: valid(2), 66: valid(66)}


@pytest.mark.parametrize(("writers", "inputs"), [(2, 1500), (66, 40)])
def test_inputs_drawn_by_lot(writers: int, inputs: int) -> None:
    told = fuzz(inputs, seed=writers, writers=writers)
    assert not told.other, told.other
    assert told.outside == 0 and told.slowest < LONGEST, told
    assert told.refused > 0.5 * inputs and told.accepted > 0, "some changes do not matter, most do"


@given(st.randoms(use_true_random=False), st.sampled_from(sorted(FILES)))
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_changes_that_hypothesis_draws(draw: random.Random, writers: int) -> None:
    store = MemoryStore("hypothesis")
    for name, text in {**FILES[writers], **mutated(FILES[writers], draw)}.items():
        store.write(f"{FOLDER}/{name}", [text])
    read_back(store)


@given(st.binary(max_size=300) | st.text().map(str.encode) | st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
).map(lambda value: json.dumps(value).encode()))  # fmt: skip
@settings(max_examples=200, deadline=None)
def test_any_bytes_are_refused(text: bytes) -> None:
    for kind in (Manifest, TreeNode, Leaf):
        with pytest.raises(CorruptCheckpointError):
            parse_metadata(kind, text, "somewhere")
    with pytest.raises(CorruptCheckpointError):
        parse_manifest(text, "somewhere")


@given(st.randoms(use_true_random=False))
@settings(max_examples=150, deadline=None)
def test_bytes_of_a_manifest_changed_anywhere_are_refused(draw: random.Random) -> None:
    changed = raw_change(FILES[2][MANIFEST_FILE], draw)
    if changed != FILES[2][MANIFEST_FILE]:
        with pytest.raises(CorruptCheckpointError):
            parse_manifest(changed, "somewhere")


def test_a_pack_said_to_be_immense_takes_no_memory() -> None:
    """A leaf of a few hundred bytes that claims 2^60: refused before memory is taken for it."""
    target, told = Target(1), Fuzzed()
    name = f"{attempt_of(7)}-000000.json"
    leaf = json.loads(target.files[name])
    huge = 2**58
    leaf["bytes"] = 4 * huge
    leaf["tensors"] = {"weight": {**leaf["tensors"]["weight"], "shape": [huge], "chunks": [
        {"offset": [0], "size": [huge], "at": 0, "crc32c": 0}]}}  # fmt: skip
    manifest = json.loads(target.files[MANIFEST_FILE])
    manifest["tensors"] = {"weight": {**manifest["tensors"]["weight"], "shape": [huge], "elements": huge}}
    manifest["children"][0]["reach"] = {"weight": {"offset": [0], "size": [huge]}}
    target.try_one(_sealed(manifest, {name: json.dumps(leaf).encode()}), told)
    assert told.refused == 1 and not told.other, told


def test_a_tree_that_names_a_child_again_and_again_ends() -> None:
    """64 times the same child on each of eight levels would be 2.8 × 10^14 of them."""
    store, files = MemoryStore("again"), dict(FILES[2])
    below, text = f"{attempt_of(7)}-000000.json", files[f"{attempt_of(7)}-000000.json"]
    manifest = json.loads(files[MANIFEST_FILE])
    node = {key: manifest[key] for key in ("attempt", "step", "format", "finite", "packs", "bytes", "tensors")}
    for level in range(1, 8):
        child = {"file": below, "bytes": len(text), "sha256": hashlib.sha256(text).hexdigest()}
        child["reach"] = manifest["children"][0]["reach"]
        below = f"{attempt_of(7)}-n{level}-000000.json"
        text = files[below] = json.dumps(
            {**node, "kind": "danlu node", "level": level, "children": [child] * 64}
        ).encode()
    manifest |= {"level": 8, "children": [{**child, "file": below}] * 64}
    for name, content in {**files, **_sealed(manifest, {below: text})}.items():
        store.write(f"{FOLDER}/{name}", [content])
    with pytest.raises(CorruptCheckpointError, match="must be named once"):
        CheckpointReader(store, STEP).find_chunks()


def test_memory_is_bounded() -> None:
    """In a process that may take 512 MiB more than it starts with."""
    script = (
        "from fuzzing import fuzz, memory_limit; memory_limit(512 << 20);"
        "told = fuzz(300, seed=9); assert not told.other, told.other; print(told.inputs)"
    )
    paths = ":".join([str(Path(__file__).parent), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0 and done.stdout.strip() == "300", done.stderr


def _sealed(manifest: dict[str, object], children: dict[str, bytes]) -> dict[str, bytes]:
    """A manifest over these children, its hashes right."""
    under = manifest["children"]
    assert isinstance(under, list)
    for child in under:
        if child["file"] in children:
            text = children[child["file"]]
            child |= {"bytes": len(text), "sha256": hashlib.sha256(text).hexdigest()}
    blank = json.dumps({**manifest, "root": "0" * 64}).encode()
    return {**children, MANIFEST_FILE: blank.replace(b"0" * 64, hashlib.sha256(blank).hexdigest().encode(), 1)}


def test_the_fence_holds() -> None:
    """The question itself is put to the test: a reader that leaves the folder, or writes, is seen."""
    target = Target(1)
    for path in ("/etc/passwd", "/store/run/../other", "/store/running"):
        with pytest.raises(Outside):
            target.calls.open(path, 0)
    assert len(target.calls.outside) == 3
    with pytest.raises(Outside):
        target.store.write("step/file", [b"x"])
