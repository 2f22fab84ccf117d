"""A grammar of each file that Danlu reads: right ones, and what mistakes, accidents and malice make of them."""

import json
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tomli_w
from hypothesis import strategies as st

MEGABYTE = 1 << 20
Draw = Callable[[st.SearchStrategy[Any]], Any]

TEXTS = [
    "",
    "\x1b[2J\x1b]0;owned\x07",
    "\x9b31m",
    "../../guard/x",
    "../guard/kept",
    "/etc/passwd",
    "-rf",
    "<img src=x onerror=alert(1)>",
    "[red]x[/red][/]",
    "a" * 300,
    "x" * 20_000,
    "\u202eevil",
    "two\nlines",
    "25",
    "0 GB",
    "nan GB/s",
    "inf s",
    "1e999999999 GB",
    "9" * 5000 + " B",
    "-5 us",
    "Ω≈ç√ 中文 🚀",
    "{0.__class__}",
    "os:system",
    "*" * 60,
    "[" * 60,
]
NUMBERS = [0, 1, -1, 7, 2**31, 2**63, 10**18, 10**30, 10**400, 0.0, -0.5, 0.3, 1e-320, 1e308]
NOT_FINITE = [float("nan"), float("inf"), float("-inf")]

PLAIN = st.one_of(st.sampled_from([*TEXTS, *NUMBERS, *NOT_FINITE, True, False, None]), st.text(max_size=20))
NASTY = st.one_of(
    PLAIN,
    PLAIN,
    st.lists(PLAIN, max_size=4),
    st.dictionaries(st.sampled_from(["name", "a", "kind", "\x1b[1m", "x" * 200, "0", ""]), PLAIN, max_size=3),
)
KEYS = st.sampled_from(["nmae", "lr", "\x1b[31m", "x" * 500, "", "a.b", "moe", "base", "weights", "🚀", "../x"])


@dataclass(frozen=True)
class Piece:
    """Bytes that take no room until they are written: `content`, repeated."""

    content: bytes
    times: int = 1


@dataclass(frozen=True)
class BadFile:
    """One file of a case, or what stands in its place."""

    path: str
    pieces: tuple[Piece, ...] = ()
    instead: str = ""
    """`folder`, `pipe`, `missing`, or the target of a link."""

    def write(self, root: Path) -> None:
        path = root / self.path
        path.parent.mkdir(parents=True, exist_ok=True)
        if self.instead == "folder":
            path.mkdir()
        elif self.instead == "pipe":
            import os

            os.mkfifo(path)
        elif self.instead.startswith("→"):
            path.symlink_to(self.instead[1:])
        elif self.instead != "missing":
            with path.open("wb") as file:
                for piece in self.pieces:
                    file.write(piece.content * piece.times)


@dataclass(frozen=True)
class Case:
    """Files in a folder, and a command that reads them."""

    kind: str
    command: tuple[str, ...]
    files: tuple[BadFile, ...] = field(default=())

    @property
    def names(self) -> list[str]:
        """What a message may call the culprit: its files and their folders, or a flag."""
        parts = {part for file in self.files for part in Path(file.path).parts}
        return [*parts, *(word for word in self.command if word.startswith("--"))]


RECIPE: dict[str, Any] = {
    "name": "tiny",
    "seed": 1,
    "steps": 20,
    "model": {
        "name": "small",
        "vocabulary": 264,
        "layers": 4,
        "width": 64,
        "heads": 8,
        "kv_heads": 4,
        "mlp_width": 128,
        "sequence": 128,
        "rope_theta": 10000.0,
        "moe": {"experts": 8, "top_k": 2, "width": 32, "shared": 1, "dense_layers": 1},
    },
    "data": {"sources": [{"shards": "a", "weight": 0.7, "source": ["text"]}, {"shards": "b"}], "cache_size": "1 GB"},
    "batch": {"sequences": 16, "length": 64},
    "optimizer": {"learning_rate": 3e-4, "weight_decay": 0.1},
    "schedule": {"kind": "wsd", "warmup": 2, "decay": 3},
    "precision": {"compute": "bf16", "layers": [{"match": "blocks.[0-1]", "compute": "fp32"}]},
    "checkpoint": {"every": 10, "store": "saves", "bandwidth": 200.0},
}
OWN_RECIPE: dict[str, Any] = RECIPE | {
    "model": {"factory": "os:system", "path": ".", "vocabulary": 264, "arguments": {"command": "touch ../guard/x"}}
}
CLUSTER: dict[str, Any] = {
    "name": "small",
    "chip": {
        "name": "chip",
        "kind": "cpu",
        "memory": "4 GB",
        "memory_bandwidth": "10 GB/s",
        "peak": {"fp32": "1 TFLOP/s", "bf16": "2 TFLOP/s"},
    },
    "levels": [
        {"name": "node", "fanout": 4, "bandwidth": "10 GB/s", "latency": "5 us"},
        {"name": "fabric", "fanout": 6, "bandwidth": "1 GB/s", "latency": "20 us", "oversubscription": 2.0},
    ],
    "tiers": [{"name": "disk", "kind": "local", "capacity": "1 TB", "read": "1 GB/s", "write": "1 GB/s"}],
    "failures": {"node_mtbf": "100 d"},
}
PLAN: dict[str, Any] = {
    "microbatches": 2,
    "recompute": "full",
    "degrees": {"pp": 2, "shard": 2, "tp": 2},
    "mapping": {"tp": {"node": 2}},
    "pipeline": {"schedule": "1f1b", "layers": [2, 2]},
}
EVENTS: list[dict[str, Any]] = [
    {"kind": "started", "time": 1000.0, "world": 2, "chip": "cpu", "parameters": 1000, "step": 0, "steps": 5}
    | {"tokens_per_step": 100, "flops_per_token": 6e3, "peak": 9e10, "peak_source": "data sheet", "baseline_loss": 4.5},
    *(
        {"kind": "step", "time": 1000.5 + step, "step": step, "loss": 4.0 / step, "norm": 1.0, "learning_rate": 3e-4}
        | {"tokens": 100, "seconds": 0.5, "memory": 3 << 30, "imbalance": 1.2}
        for step in range(1, 5)
    ),
    {"kind": "saved", "time": 1004.0, "step": 4, "path": "checkpoints/step-4", "seconds": 1.0, "stall": 0.1},
    {"kind": "resumed", "time": 1005.0, "step": 4, "was": {"shard": 2}, "now": {"tp": 2}, "tensors": 8, "bytes": 9}
    | {"samples": 64, "saved": 8},
    {"kind": "rehearsed", "time": 1005.0, "bytes": 9, "seconds": 1.0, "stall": 0.1, "bandwidth": 1e9},
    {"kind": "warning", "time": 1006.0, "rank": 1, "message": "slow"},
    {"kind": "ended", "time": 1007.0, "step": 5, "outcome": "finished", "message": "done"},
]
INDEX: dict[str, Any] = {
    "format": 1,
    "tokenizer": "bytes",
    "vocabulary": 257,
    "end_of_text": 256,
    "dtype": "uint16",
    "tokens": 32,
    "documents": 1,
    "unigram_loss": 2.5,
    "sources": ["text"],
    "shards": [{"file": "00000.bin", "tokens": 32, "sha256": "0" * 64, "documents": 1}],
}
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 16,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 32,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    | {"original_max_position_embeddings": 64},
    "attention_bias": False,
    "hidden_act": "silu",
    "torch_dtype": "float32",
}
_LAYER = "model.layers.0."
TENSORS: dict[str, list[int]] = {
    "model.embed_tokens.weight": [16, 8],
    f"{_LAYER}input_layernorm.weight": [8],
    f"{_LAYER}self_attn.q_proj.weight": [8, 8],
    f"{_LAYER}self_attn.k_proj.weight": [4, 8],
    f"{_LAYER}self_attn.v_proj.weight": [4, 8],
    f"{_LAYER}self_attn.o_proj.weight": [8, 8],
    f"{_LAYER}post_attention_layernorm.weight": [8],
    f"{_LAYER}mlp.gate_proj.weight": [12, 8],
    f"{_LAYER}mlp.up_proj.weight": [12, 8],
    f"{_LAYER}mlp.down_proj.weight": [8, 12],
    "model.norm.weight": [8],
    "lm_head.weight": [16, 8],
}
TOKENIZER: dict[str, Any] = {
    "version": "1.0",
    "added_tokens": [{"id": 2, "content": "</s>", "single_word": False, "lstrip": False, "rstrip": False}
    | {"normalized": False, "special": True}],
    "model": {"type": "WordLevel", "vocab": {"a": 0, "b": 1, "</s>": 2}, "unk_token": "a"},
}  # fmt: skip


def _paths(tree: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The place of every value inside a tree."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    return [below for key, inner in items for below in [(*path, key), *_paths(inner, (*path, key))]]


def changed(draw: Draw, tree: Any, most: int = 3) -> Any:
    """A copy of a tree with a few values replaced, removed, doubled, renamed or added."""
    tree = json.loads(json.dumps(tree))
    for _ in range(draw(st.integers(0, most))):
        paths = _paths(tree)
        if not paths:
            return tree
        path = draw(st.sampled_from(paths))
        parent = tree
        for part in path[:-1]:
            parent = parent[part]
        match draw(st.sampled_from(["replace"] * 5 + ["remove", "add", "list", "rename"])):
            case "replace":
                parent[path[-1]] = draw(NASTY)
            case "remove":
                del parent[path[-1]]
            case "list":
                parent[path[-1]] = [parent[path[-1]]] * draw(st.sampled_from([0, 1, 2, 300]))
            case "rename" if isinstance(parent, dict):
                parent[draw(KEYS)] = parent.pop(path[-1])
            case _ if isinstance(parent, dict):
                parent[draw(KEYS)] = draw(NASTY)
    return tree


def _without_none(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: _without_none(value) for key, value in tree.items() if value is not None}
    return [_without_none(value) for value in tree if value is not None] if isinstance(tree, list) else tree


def as_toml(tree: Any) -> bytes:
    text: str = tomli_w.dumps(_without_none(_digits(tree)))
    return text.encode("utf-8", "surrogatepass").replace(b'"HUGE"', b"1" + b"0" * 400)


def _digits(tree: Any) -> Any:
    """Whole numbers beyond what a writer takes, marked."""
    if isinstance(tree, dict):
        return {key: _digits(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [_digits(value) for value in tree]
    return "HUGE" if isinstance(tree, int) and abs(tree) >= 10**300 else tree


def as_json(tree: Any) -> bytes:
    return json.dumps(tree, indent=1, ensure_ascii=False).encode("utf-8", "surrogatepass")


def as_safetensors(header: Any) -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(4 * sum(_elements(shape) for shape in TENSORS.values()))


def _elements(shape: list[int]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def header() -> dict[str, Any]:
    entries, at = {}, 0
    for name, shape in TENSORS.items():
        entries[name] = {"dtype": "F32", "shape": shape, "data_offsets": [at, at + 4 * _elements(shape)]}
        at += 4 * _elements(shape)
    return entries


DEEP = {"toml": b"deep = %s%s\n", "json": b"%s%s", "jsonl": b"%s%s\n", "raw": b"%s%s"}
FILLING = {
    "toml": [b"# nothing\n", b"\n", b"[[x]]\n", b'k = "v"\n', b"a.b.c.d = 1\n", b"x", b" ", b"[a]\n"],
    "json": [b" ", b"[", b'{"a":', b"1,", b"x", b"\n", b'"k": 1,\n'],
    "jsonl": [b"\n", b"{}\n", b"x", b'{"kind": "step"}\n',
        b'{"kind": "warning", "time": 1, "rank": 0, "message": "m"}\n'],
    "raw": [b"\0", b"x", b"\x1b[2J\n"],
}  # fmt: skip


def damaged(draw: Draw, path: str, content: bytes, form: str, most_megabytes: int = 50) -> BadFile:
    """The file with what editors, disks and enemies do to it; most often nothing."""
    instead = draw(st.sampled_from([""] * 30 + ["folder", "pipe", "missing", "→../guard/kept", "→loop", "→/dev/zero"]))
    if instead:
        return BadFile(path, (), f"→{Path(path).name}" if instead == "→loop" else instead)
    pieces = [Piece(content)]
    at = draw(st.integers(0, 100)) * len(content) // 100
    match draw(
        st.sampled_from(
            ["none"] * 12 + ["cut", "insert", "bom", "nul", "latin", "utf16", "twice", "deep", "crlf", "fill"]
        )
    ):
        case "cut":
            pieces = [Piece(content[:at])]
        case "insert":
            pieces = [Piece(content[:at]), Piece(draw(st.binary(max_size=12))), Piece(content[at:])]
        case "bom":
            pieces.insert(0, Piece(b"\xef\xbb\xbf"))
        case "nul":
            pieces = [Piece(content[:at]), Piece(b"\0"), Piece(content[at:])]
        case "latin":
            pieces = [Piece(content[:at]), Piece(b"\xe9\xff"), Piece(content[at:])]
        case "utf16":
            pieces = [Piece(content.decode("utf-8", "replace").encode("utf-16"))]
        case "twice":
            pieces = [Piece(content, 2)]
        case "crlf":
            pieces = [Piece(content.replace(b"\n", b"\r\n"))]
        case "deep":
            times = draw(st.sampled_from([10, 200, 5000, 200_000]))
            before, _, after = DEEP[form].partition(b"%s%s")
            opening, closing = draw(st.sampled_from([(b"[", b"]"), (b'{"a":', b"}"), (b"{a=", b"}"), (b"a.", b"a=1")]))
            pieces = [Piece(before), Piece(opening, times), Piece(closing, times), Piece(after), Piece(content)]
        case "fill":
            filling = draw(st.sampled_from(FILLING[form]))
            size = draw(st.sampled_from([1, 1, 1, 5, most_megabytes])) * MEGABYTE
            pieces.insert(draw(st.integers(0, 1)), Piece(filling, size // len(filling)))
    return BadFile(path, tuple(pieces))


def toml_file(draw: Draw, path: str, tree: dict[str, Any]) -> BadFile:
    return damaged(draw, path, as_toml(changed(draw, tree)), "toml")


def good_file(path: str, tree: dict[str, Any]) -> BadFile:
    return BadFile(path, (Piece(as_toml(tree)),))


@st.composite
def recipes(draw: Draw) -> Case:
    tree = draw(st.sampled_from([RECIPE, RECIPE, RECIPE, OWN_RECIPE]))
    files = [toml_file(draw, "recipe.toml", tree)]
    command = [
        "check",
        "recipe.toml",
        *draw(st.sampled_from([[], ["--json"], ["--no-import"], ["--cluster", "local"]])),
    ]
    if tree is RECIPE and draw(st.integers(0, 3)) == 0:
        command = ["plan", "recipe.toml", "--cluster", "local", "--fix", "microbatch=1"]
    return Case("recipe", tuple(command), tuple(files))


@st.composite
def clusters(draw: Draw) -> Case:
    files = [good_file("recipe.toml", RECIPE), toml_file(draw, "cluster.toml", CLUSTER)]
    command = ["check", "recipe.toml", "--cluster", "cluster.toml"]
    if draw(st.integers(0, 2)) == 0:
        command = ["plan", "recipe.toml", "--cluster", "cluster.toml", "--chips", "2", "--fix", "microbatch=1"]
    return Case("cluster", tuple(command), tuple(files))


@st.composite
def plans(draw: Draw) -> Case:
    files = [good_file("recipe.toml", RECIPE), good_file("cluster.toml", CLUSTER), toml_file(draw, "plan.toml", PLAN)]
    command = ["check", "recipe.toml", "--plan", "plan.toml", "--cluster", "cluster.toml"]
    if draw(st.integers(0, 4)) == 0:
        command = ["plan", "recipe.toml", "--cluster", "cluster.toml", "--compare", "plan.toml", "--chips", "8"]
        command += ["--fix", "microbatch=1,recompute=full,schedule=1f1b"]
    return Case("plan", tuple(command), tuple(files))


@st.composite
def run_folders(draw: Draw) -> Case:
    name = draw(st.sampled_from(["tiny", "tiny", "\x1b[31mred", "<b>", "a b", "-x"]))
    events = [changed(draw, event, 1) for event in EVENTS[: draw(st.integers(0, len(EVENTS)))]]
    lines = b"".join(json.dumps(event).encode() + b"\n" for event in events)
    # The events of a long run are many: they are read in pieces, and so are not refused for their size.
    files = [
        toml_file(draw, f"runs/{name}/recipe.toml", RECIPE),
        toml_file(draw, f"runs/{name}/plan.toml", PLAN),
        damaged(draw, f"runs/{name}/events.jsonl", lines, "jsonl"),
    ]
    if draw(st.booleans()):
        files.append(toml_file(draw, f"runs/{name}/cluster.toml", CLUSTER))
    if draw(st.booleans()):
        files.append(damaged(draw, f"runs/{name}/logs/rank-0.log", b"said\n" * 20, "raw"))
        files.append(damaged(draw, f"runs/{name}/data.jsonl", b'{"a": 1}\n', "jsonl"))
    if draw(st.booleans()):
        manifest = as_json(changed(draw, {"format": 1, "step": 4, "root": "x", "tensors": []}))
        files.append(damaged(draw, f"runs/{name}/checkpoints/step-00000004/manifest.json", manifest, "json"))
    chosen = draw(
        st.sampled_from(["runs", "runs --json", "show", "show --json", "ckpt ls", "ckpt show", "ckpt ls --json"])
    )
    words = chosen.split()
    if words[0] == "show":
        words += ["--no-open", "--", f"runs/{name}"]
    elif words[0] == "ckpt":
        words += ["--", f"runs/{name}"]
    return Case("run folder", tuple(words), tuple(files))


@st.composite
def data_sets(draw: Draw) -> Case:
    files = [
        damaged(draw, "data/index.json", as_json(changed(draw, INDEX)), "json"),
        damaged(draw, "data/00000.bin", bytes(range(64)), "raw", most_megabytes=5),
    ]
    command = ["data", draw(st.sampled_from(["show", "verify"])), "data"]
    if draw(st.integers(0, 3)) == 0:
        files.append(damaged(draw, "tokenizer.json", as_json(changed(draw, TOKENIZER)), "json"))
        files.append(BadFile("text.txt", (Piece(b"a b\n", 10),)))
        command = ["data", "build", "text.txt", "-o", "built", "--tokenizer", "tokenizer.json"]
    return Case("data set", tuple(command), tuple(files))


@st.composite
def hf_folders(draw: Draw) -> Case:
    config = damaged(draw, "hf/config.json", as_json(changed(draw, CONFIG)), "json")
    if draw(st.booleans()):
        tensors = as_safetensors(changed(draw, header(), 2))
        weights = [damaged(draw, "hf/model.safetensors", tensors, "raw", most_megabytes=5)]
    else:
        file = "model-00001-of-00001.safetensors"
        names = {"metadata": {"total_size": 1}, "weight_map": dict.fromkeys(TENSORS, file)}
        index = as_json(changed(draw, names))
        weights = [
            damaged(draw, "hf/model.safetensors.index.json", index, "json"),
            damaged(draw, f"hf/{file}", as_safetensors(changed(draw, header(), 1)), "raw", most_megabytes=5),
        ]
    tokenizer = damaged(draw, "hf/tokenizer.json", as_json(TOKENIZER), "json")
    return Case(
        "Hugging Face folder", ("import", "hf", "hf", "-o", "out", "--no-compare"), (config, *weights, tokenizer)
    )


CASES: st.SearchStrategy[Case] = st.one_of(
    recipes(), recipes(), clusters(), plans(), run_folders(), run_folders(), data_sets(), hf_folders(), hf_folders()
)
