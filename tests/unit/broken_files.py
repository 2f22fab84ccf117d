"""Recipes, plans and clusters that each hold one mistake a person makes, as changes to files that are right."""

from dataclasses import dataclass
from pathlib import Path

RECIPE = """\
name = "tiny"
steps = 100

[model]
vocabulary = 256
layers = 4
width = 64
heads = 8
kv_heads = 4
mlp_width = 128
sequence = 128

[data]
shards = "shards"

[batch]
sequences = 16
length = 64

[schedule]
warmup = 10

[precision]
compute = "bf16"
"""

EXPERTS = RECIPE.replace("[data]", "[model.moe]\nexperts = 8\ntop_k = 2\nwidth = 32\nshared = 1\n\n[data]")

CLUSTER = """\
name = "small"

[chip]
name = "chip"
kind = "cpu"
memory = "4 GB"
memory_bandwidth = "10 GB/s"
peak = {fp32 = "1 TFLOP/s", bf16 = "2 TFLOP/s"}

[[levels]]
name = "node"
fanout = 4
bandwidth = "10 GB/s"
latency = "5 us"

[[levels]]
name = "fabric"
fanout = 6
bandwidth = "1 GB/s"
latency = "20 us"
"""

ZERO_BUBBLE = 'microbatches = 2\npipeline = {schedule = "zero-bubble", stages_per_rank = 2}'

PLAN = "[degrees]\nshard = 2\n"


@dataclass(frozen=True)
class Files:
    """The texts of one case; a file that is left out is not given to the command."""

    recipe: str = RECIPE
    plan: str | None = None
    cluster: str | None = None

    def write(self, folder: Path) -> list[str]:
        """Write the files, and return the arguments that name them."""
        arguments = ["recipe.toml"]
        (folder / "recipe.toml").write_text(self.recipe, encoding="utf-8")
        for name, text in (("plan", self.plan), ("cluster", self.cluster)):
            if text is not None:
                (folder / f"{name}.toml").write_text(text, encoding="utf-8")
                arguments += [f"--{name}", f"{name}.toml"]
        return arguments


def _recipe(old: str, new: str, text: str = RECIPE) -> Files:
    assert text.count(old) == 1, f"{old!r} must stand once in the recipe"
    return Files(text.replace(old, new))


def _data(text: str) -> Files:
    return _recipe('shards = "shards"\n', f"{text}\n")


def _cluster(old: str, new: str) -> Files:
    assert CLUSTER.count(old) == 1, f"{old!r} must stand once in the cluster"
    return Files(cluster=CLUSTER.replace(old, new))


def _plan(degrees: str, rest: str = "", recipe: str = RECIPE, cluster: str | None = None) -> Files:
    return Files(recipe, f"{rest}\n[degrees]\n{degrees}\n".lstrip(), cluster)


def _mapped(degrees: str, mapping: str, recipe: str = RECIPE) -> Files:
    return Files(recipe, f"[degrees]\n{degrees}\n\n[mapping]\n{mapping}\n", CLUSTER)


READING = {
    "syntax": _recipe("steps = 100", "steps = = 100"),
    "unterminated": _recipe('compute = "bf16"\n', 'compute = "bf16'),
    "unknown-key": _recipe("warmup = 10", "warmpu = 10"),
    "unknown-key-of-model": _recipe("vocabulary = 256", "vocabulary = 256\nbsae = 'x'"),
    "unknown-table": _recipe("[precision]", "[percision]"),
    "missing-key": _recipe("sequences = 16\n", ""),
    "checkpoint-store-unknown": _recipe("[precision]", '[checkpoint]\nstore = "gs://bucket/runs"\n\n[precision]'),
    "checkpoint-options-of-a-folder": _recipe(
        "[precision]", '[checkpoint]\nstore = "/shared"\noptions = {endpoint = "http://x"}\n\n[precision]'
    ),
    "shards-and-sources": _data('shards = "a"\nsources = [{shards = "b"}]'),
    "no-shards": _data('tokenizer = "bytes"'),
    "source-beside-sources": _data('sources = [{shards = "b"}]\nsource = ["text"]'),
    "weight-not-positive": _data('sources = [{shards = "a", weight = 0}, {shards = "b"}]'),
    "weight-misspelt": _data('[[data.sources]]\nshards = "a"\nweigth = 2'),
    "missing-table": _recipe('[data]\nshards = "shards"\n', ""),
    "wrong-type": _recipe("layers = 4", 'layers = "4"'),
    "not-positive": _recipe("heads = 8\n", "heads = 0\n"),
    "unknown-choice": _recipe('"bf16"', '"bfloat16"'),
    "unknown-base": _recipe("vocabulary = 256", 'base = "lama3-8b"\nvocabularly = 256'),
    "base-is-not-a-name": _recipe("vocabulary = 256", "base = ['llama3-8b']"),
    "several": Files(RECIPE.replace("steps = 100", "step = 100").replace("length = 64", "length = 6.4")),
    "heads-of-groups": _recipe("kv_heads = 4", "kv_heads = 3"),
    "width-of-heads": _recipe("width = 64", "width = 60"),
    "odd-head": _recipe("width = 64", "width = 72"),
    "too-many-chosen": _recipe("top_k = 2", "top_k = 9", EXPERTS),
    "too-many-dense-layers": _recipe("shared = 1", "shared = 1\ndense_layers = 5", EXPERTS),
    "word-of-another-system": _recipe("vocabulary = 256", "vocab_size = 256"),
    "unknown-axis": Files(plan="[degrees]\ndp = 2\n"),
    "unknown-mapped-axis": Files(plan=PLAN + "[mapping]\ntpp = {node = 2}\n", cluster=CLUSTER),
    "bad-unit": _cluster('"4 GB"', '"4 gigs"'),
    "bits": _cluster('"1 GB/s"', '"8 Gb/s"'),
    "no-unit": _cluster('"1 GB/s"', "25"),
    "no-unit-of-bytes": _cluster('"4 GB"', "80_000_000_000"),
    "no-unit-of-seconds": _cluster('"20 us"', "20"),
    "no-memory": _cluster('"4 GB"', '"0 GB"'),
    "slow-network": _cluster('"1 GB/s"', '"25 B/s"'),
    "unknown-chip-kind": _cluster('kind = "cpu"', 'kind = "nvidia"'),
    "name-out-of-the-folder": _recipe('name = "tiny"', 'name = "../../x"'),
    "name-is-a-path": _recipe('name = "tiny"', 'name = "/etc/x"'),
    "name-with-escapes": _recipe('name = "tiny"', 'name = "\\u001b[31mred"'),
    "name-like-an-option": _recipe('name = "tiny"', 'name = "-rf"'),
    "name-like-a-tag": _recipe('name = "tiny"', 'name = "<img src=x>"'),
    "name-too-long": _recipe('name = "tiny"', f'name = "{"x" * 300}"'),
    "name-empty": _recipe('name = "tiny"', 'name = ""'),
    "model-name-with-escapes": _recipe("vocabulary = 256", 'vocabulary = 256\nname = "\\u001b]0;title"'),
    "absurd-width": _recipe("width = 64", f"width = {10**18}"),
    "absurd-layers": _recipe("layers = 4", f"layers = {10**9}"),
    "more-digits-than-fit": _recipe("layers = 4", f"layers = 0x{'f' * 5000}"),
    "nested-brackets": _recipe('shards = "shards"', f"shards = {'[' * 5000}{']' * 5000}"),
    "nested-keys": _recipe('shards = "shards"', f"{'a.' * 5000}b = 1"),
    "infinite": _cluster('"1 GB/s"', '"inf GB/s"'),
    "missing-latency": _cluster('latency = "20 us"\n', ""),
    "no-levels": Files(cluster=CLUSTER[: CLUSTER.index("[[levels]]")]),
    "same-level-twice": _cluster('"fabric"', '"node"'),
    "unknown-peak": _cluster("fp32 =", "float32 ="),
    "all-files": Files(RECIPE.replace("steps", "stesp"), "[degrees]\ntp = 0\n", CLUSTER.replace("fanout = 6\n", "")),
    "one-file-unreadable": Files(RECIPE.replace("warmup = 10", "warmup = 200"), "[degrees\n", CLUSTER),
}

RING = 'context_parallel = "ring"'
CONTRADICTIONS = {
    "kv-heads-by-tp": _plan("tp = 8"),
    "heads-by-tp": _plan("tp = 3", recipe=RECIPE.replace("kv_heads = 4\n", "").replace("= 256", "= 258")),
    "mlp-by-tp": _plan("tp = 4", recipe=RECIPE.replace("mlp_width = 128", "mlp_width = 126")),
    "shared-by-tp": _plan("tp = 4", recipe=EXPERTS.replace("width = 32", "width = 30")),
    "vocabulary-by-tp": _plan("tp = 4", recipe=RECIPE.replace("= 256", "= 255")),
    "vocabulary-of-base": _plan(
        "tp = 8",
        recipe='name = "x"\nsteps = 1\nmodel = {base = "gpt3-175b", vocabulary = 50257}\n'
        '[data]\nshards = "x"\n[batch]\nsequences = 1\nlength = 2048\n',
    ),
    "length-by-cp-and-tp": _plan("cp = 2\ntp = 4", recipe=RECIPE.replace("length = 64", "length = 60")),
    "heads-by-cp": _plan("cp = 3", recipe=RECIPE.replace("length = 64", "length = 66")),
    "kv-heads-by-cp": _plan(
        "cp = 4",
        recipe=RECIPE.replace("kv_heads = 4", "kv_heads = 6").replace("heads = 8\n", "heads = 12\nhead_width = 8\n"),
    ),
    "length-by-ring-cp": _plan("cp = 4", RING, recipe=RECIPE.replace("length = 64", "length = 60")),
    "length-by-ring-cp-and-tp": _plan("cp = 2\ntp = 4", RING, recipe=RECIPE.replace("length = 64", "length = 68")),
    "ring-without-cp": _plan("tp = 2", RING),
    "parts-without-ep": _plan("tp = 2", "dispatch_chunks = 2", recipe=EXPERTS),
    "deduplicated-without-ep": _plan("tp = 2", 'token_dispatcher = "deduplicated"', recipe=EXPERTS),
    "ring-of-windows": _plan("cp = 2", RING, RECIPE.replace("\nheads = ", "\nwindow = 16\nheads = ")),
    "sequences-by-data": _plan("replicate = 2\nshard = 3"),
    "microbatches": _plan("shard = 2", "microbatches = 3"),
    "too-few-layers": _plan("pp = 8", "microbatches = 8"),
    "stages-without-layers": _plan(
        "pp = 4", 'microbatches = 4\npipeline = {schedule = "interleaved", stages_per_rank = 2}'
    ),
    "pipeline-layers-entries": _plan("pp = 2", "microbatches = 2\npipeline.layers = [1, 2, 1]"),
    "pipeline-layers-sum": _plan("pp = 2", "microbatches = 2\npipeline.layers = [3, 2]"),
    "pipeline-layers-empty": _plan("pp = 2", "microbatches = 2\npipeline.layers = [0, 4]"),
    "looped-with-one-stage": _plan("pp = 2", 'microbatches = 2\npipeline.schedule = "interleaved"'),
    "zbv-with-three-stages": _plan(
        "pp = 2",
        'microbatches = 4\npipeline = {schedule = "zbv", stages_per_rank = 3}',
        RECIPE.replace("layers = 4", "layers = 6"),
    ),
    "plain-with-two-stages": _plan("pp = 2", "microbatches = 2\npipeline.stages_per_rank = 2"),
    "split-backward-resharded": _plan("pp = 2", f"reshard_after_forward = true\n{ZERO_BUBBLE}"),
    "split-backward-compiled": _plan("pp = 2", f"compile = true\n{ZERO_BUBBLE}"),
    "split-backward-recomputed": _plan("pp = 2", f'recompute = "selective"\n{ZERO_BUBBLE}'),
    "split-backward-recomputed-by-layer": _plan(
        "pp = 2", f'recompute = {{full = "0", selective = "1"}}\n{ZERO_BUBBLE}'
    ),
    "operators-compiled": _plan("shard = 2", 'compile = true\noperators = {rotate = "torch"}'),
    "loss-in-parts-of-a-pipeline": _plan("pp = 2", "microbatches = 2\nloss_chunks = 4"),
    "regather-without-tp": _plan("shard = 2", "regather_inputs = true"),
    "regather-compiled": _plan("tp = 2", "regather_inputs = true\ncompile = true"),
    "regather-recomputed": _plan("tp = 2", 'regather_inputs = true\nrecompute = "selective"'),
    "gradients-by-microbatch-in-a-pipeline": _plan("pp = 2", 'microbatches = 2\nreduce_gradients = "microbatch"'),
    "gradients-of-one-microbatch": _plan("shard = 2", 'reduce_gradients = "step"'),
    "optimizer-over-no-replicas": _plan("shard = 2", "shard_optimizer_over_replicas = true"),
    "muon-over-replicas": _plan(
        "replicate = 2",
        "shard_optimizer_over_replicas = true",
        RECIPE.replace("[schedule]", '[optimizer]\nkind = "muon"\n\n[schedule]'),
    ),
    "recompute-unknown-layer": _plan("shard = 2", 'recompute = {full = "0-1", selective = "2-9"}'),
    "pipeline-ignored": _plan("shard = 2", 'pipeline = {schedule = "zbv", stages_per_rank = 2, layers = [2, 2]}'),
    "pipeline-starved": _plan("pp = 4", "microbatches = 2"),
    "interleaved-rounds": _plan(
        "pp = 2\nshard = 2",
        'microbatches = 5\npipeline = {schedule = "interleaved", stages_per_rank = 2}',
        RECIPE.replace("sequences = 16", "sequences = 20"),
    ),
    "zbv-starved": _plan("pp = 2", 'microbatches = 2\npipeline = {schedule = "zbv", stages_per_rank = 2}'),
    "batch-too-small-for-pipeline": _plan("pp = 4\nshard = 8", "microbatches = 2"),
    "tied-over-stages": _plan("pp = 2", "microbatches = 2", RECIPE.replace("[data]", "tied = true\n\n[data]", 1)),
    "experts-by-ep": _plan("shard = 16\nep = 16", recipe=EXPERTS),
    "ranks-by-ep": _plan("shard = 2\nep = 4", recipe=EXPERTS),
    "no-experts": _plan("shard = 2\nep = 2"),
    "positions-end": Files(RECIPE.replace("sequence = 128", 'sequence = 32\nposition = "learned"')),
    "warmup-too-long": _recipe("warmup = 10", "warmup = 101"),
    "source-named-twice": _data('sources = [\n  {shards = "a", weight = 2},\n  {shards = "a"},\n]'),
    "weights-too-fine": _data(
        '[[data.sources]]\nshards = "a"\n\n[[data.sources]]\nshards = "b"\nweight = 0.00123456789'
    ),
    "store-without-cache": _data('shards = "s3://bucket/tokens"'),
    "cache-without-store": _data('shards = "shards"\ncache = "cache"'),
    "store-unknown": _data('shards = "gs://bucket/tokens"\ncache = "cache"'),
    "evaluation-without-data": _recipe("warmup = 10", "warmup = 10\n[evaluation]\nevery = 5"),
    "samples-without-prompts": _recipe("warmup = 10", "warmup = 10\n[evaluation]\nsample_tokens = 5"),
    "evaluation-of-less-than-a-sequence": _recipe(
        "warmup = 10", 'warmup = 10\n[evaluation]\ntokens = 63\ndata = [{name = "a", shards = "held-out"}]'
    ),
    "evaluation-on-training-data": _recipe(
        "warmup = 10", 'warmup = 10\n[evaluation]\ndata = [{name = "a", shards = "shards"}]'
    ),
    "evaluation-named-twice": _recipe(
        "warmup = 10",
        'warmup = 10\n[evaluation]\ndata = [{name = "a", shards = "b"}, {name = "a", shards = "c"}]',
    ),
    "wandb-without-project": _recipe("warmup = 10", 'warmup = 10\n[metrics]\nwandb_mode = "offline"'),
    "rewind-without-checkpoints": _recipe("warmup = 10", 'warmup = 10\n[spikes]\npolicy = "rewind"'),
    "rewind-of-the-only-checkpoint": _recipe(
        "warmup = 10", 'warmup = 10\n[spikes]\npolicy = "rewind"\n[checkpoint]\nevery = 20\nkeep = 1'
    ),
    "rewind-too-far": _recipe(
        "warmup = 10", 'warmup = 10\n[spikes]\npolicy = "rewind"\nrewind = 50\n[checkpoint]\nevery = 20\nkeep = 3'
    ),
    "rewind-ignored": _recipe("warmup = 10", 'warmup = 10\n[spikes]\npolicy = "skip"\nmax_rewinds = 5'),
    "spike-settings-ignored": _recipe("warmup = 10", 'warmup = 10\n[spikes]\npolicy = "off"\nthreshold = 20.0'),
    "run-too-short-for-spikes": _recipe("warmup = 10", 'warmup = 10\n[spikes]\npolicy = "skip"\nwindow = 4096'),
    "decay-ignored": _recipe("warmup = 10", "decay = 10"),
    "decay-too-long": _recipe("warmup = 10", 'kind = "wsd"\nwarmup = 60\ndecay = 50'),
    "pattern-matches-nothing": _recipe(
        '"bf16"\n', '"bf16"\n\n[[precision.layers]]\nmatch = "blocks.4"\ncompute = "fp32"\n'
    ),
    "pattern-of-experts": _recipe(
        '"bf16"\n', '"bf16"\nlayers = [{match = "blocks.*.mlp.experts", compute = "fp32"}]\n'
    ),
    "shape-ignored": _recipe("warmup = 10", 'shape = "1-sqrt"'),
    "ramp-ends-late": _recipe("length = 64", "length = 64\nramp = [{until = 100, sequences = 8}]"),
    "ramp-goes-back": _recipe(
        "length = 64", "length = 64\nramp = [{until = 20, sequences = 4}, {until = 20, sequences = 8}]"
    ),
    "ramp-falls": _recipe("length = 64", "length = 64\nramp = [{until = 20, sequences = 16}]"),
    "ramp-by-microbatches": _plan(
        "shard = 2",
        "microbatches = 4",
        RECIPE.replace("length = 64", "length = 64\nramp = [{until = 9, sequences = 6}]"),
    ),
    "ramp-starves-the-pipeline": _plan(
        "pp = 2", "microbatches = 4", RECIPE.replace("length = 64", "length = 64\nramp = [{until = 9, sequences = 4}]")
    ),
    "ramp-by-ranks": _plan(
        "shard = 4", "", RECIPE.replace("length = 64", "length = 64\nramp = [{until = 9, sequences = 6}]")
    ),
    "muon-in-a-precision-that-the-chip-lacks": Files(
        RECIPE.replace("[schedule]", '[optimizer]\nkind = "muon"\n\n[schedule]').replace('"bf16"', '"fp32"'),
        cluster=CLUSTER.replace(', bf16 = "2 TFLOP/s"', ""),
    ),
    "muon-settings-ignored": _recipe("[schedule]", "[optimizer]\nmomentum = 0.9\n\n[schedule]"),
    "group-matches-nothing": _recipe(
        "[schedule]", '[[optimizer.groups]]\nmatch = "blocks.4.*"\nweight_decay = 0\n\n[schedule]'
    ),
    "group-sets-nothing": _recipe("[schedule]", '[[optimizer.groups]]\nmatch = "embed.*"\n\n[schedule]'),
    "group-never-wins": _recipe(
        "[schedule]",
        '[optimizer]\ngroups = [{match = "embed.*", weight_decay = 0}, {match = "*", weight_decay = 1}]\n\n[schedule]',
    ),
    "group-of-vectors-by-muon": _recipe(
        "[schedule]", '[[optimizer.groups]]\nmatch = "blocks.*.attention*"\nkind = "muon"\n\n[schedule]'
    ),
    "loss-scale-ignored": _recipe('"bf16"', '"bf16"\nloss_scale = {initial = 1024}'),
    "block-ignored": _recipe('"bf16"', '"bf16"\nblock = 64'),
    "precision-group-sets-nothing": _recipe('"bf16"', '"bf16"\nlayers = [{match = "blocks.0"}]'),
    "head-quantized": _recipe('"bf16"', '"bf16"\nlayers = [{match = "head", matmul = "fp8"}]'),
    "blocks-cut-by-tp": _plan("tp = 4", recipe=RECIPE.replace('"bf16"', '"bf16"\nmatmul = "mxfp8"')),
    "blocks-cut-by-ring-cp": _plan("cp = 2", RING, RECIPE.replace('"bf16"', '"bf16"\nmatmul = "mxfp8"')),
    "blocks-cut-by-cp": _plan("cp = 4", recipe=RECIPE.replace('"bf16"', '"bf16"\nmatmul = "mxfp8"')),
    "quantized-inputs-regathered": _plan(
        "tp = 2", "regather_inputs = true", RECIPE.replace('"bf16"', '"bf16"\nmatmul = "fp8"\nblock = 16')
    ),
    "quantized-compiled": _plan("shard = 2", "compile = true", RECIPE.replace('"bf16"', '"bf16"\nmatmul = "fp8"')),
    "too-many-ranks": _plan("shard = 16\ntp = 4", cluster=CLUSTER),
    "uneven-ranks": _plan("shard = 9", recipe=RECIPE.replace("sequences = 16", "sequences = 18"), cluster=CLUSTER),
    "unknown-level": _mapped("tp = 2", "tp = {nod = 2}"),
    "mapping-product": _mapped("shard = 2\ntp = 4", "tp = {node = 2}"),
    "mapping-product-over-levels": _mapped("shard = 4\ncp = 2", "shard = {node = 4, fabric = 2}"),
    "level-overfull": _mapped("shard = 2\ntp = 4", "tp = {node = 4}\nshard = {node = 2}"),
    "level-indivisible": _mapped("shard = 8", "shard = {fabric = 8}"),
    "experts-off-their-ranks": _mapped(
        "replicate = 4\nshard = 2\nep = 2", "replicate = {node = 4}\nep = {node = 2}", EXPERTS
    ),
    "mapping-without-cluster": Files(plan="[degrees]\ntp = 2\n\n[mapping]\ntp = {node = 2}\n"),
    "peak-missing": Files(cluster=CLUSTER.replace(', bf16 = "2 TFLOP/s"', "")),
}
