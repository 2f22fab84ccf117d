"""What to train: model, data, batch, optimizer, precision, steps."""

from collections.abc import Container
from math import log2
from typing import Annotated, Any, Literal, Self

from pydantic import Discriminator, Field, Tag, model_validator

from danlu.spec.custom_model import CustomModel
from danlu.spec.description import MAX_COUNT, PositiveInt, SpecModel, TupleOf
from danlu.spec.model import Model, Mtp, SequenceLength
from danlu.spec.names import Name
from danlu.spec.quantity import Bytes
from danlu.spec.resilience import ResilienceConfig
from danlu.spec.spikes import SpikeConfig

MODEL_TAGS = ("described", "own")
"""The two ways to specify a model: by its shape, or by the code that builds it."""


def _model_kind(value: Any) -> str:
    """Which of the two a table is, even if a setting is misspelled."""
    if isinstance(value, dict):
        custom, described = set(CustomModel.model_fields), set(Model.model_fields)
        return "own" if value.keys() & (custom - described) else "described"
    return "own" if isinstance(value, CustomModel) else "described"


ComputeDtype = Literal["fp32", "bf16", "fp16"]
MatmulFormat = Literal["none", "fp8", "mxfp8"]
MATMUL_BLOCKS: dict[MatmulFormat, int] = {"none": 1, "fp8": 128, "mxfp8": 32}
"""Elements that share a scale, in the formats that chips multiply."""
OptimizerKind = Literal["adamw", "muon"]
DecayShape = Literal["linear", "cosine", "1-sqrt"]

Access = Literal["owner", "group", "everyone"]


def has_experts(model: Model | CustomModel) -> bool:
    """Whether a model has expert layers that Danlu shards over ranks."""
    return isinstance(model, Model) and model.moe is not None


class ShardSource(SpecModel):
    """Token shards, and what to build them from if the folder does not exist yet."""

    shards: str
    """Folder of token shards, relative to the recipe, or `s3://bucket/prefix`."""
    source: TupleOf[str] = ()
    """Files or folders of text or JSON lines to build the shards from; `python-stdlib` is this Python's own library."""


class DataSource(ShardSource):
    """One dataset of a mixture."""

    weight: float = Field(default=1.0, gt=0, le=1e9, allow_inf_nan=False)
    """Its share of the samples, relative to the sum of all weights."""


class DataConfig(SpecModel):
    """Token shards, or several datasets mixed by weight, and what to build them from if a folder does not exist yet."""

    shards: str = ""
    """Folder of token shards, relative to the recipe, or `s3://bucket/prefix`."""
    sources: TupleOf[DataSource] = Field(default=(), max_length=10_000)
    """Several datasets instead, each with its weight; they share one tokenizer."""
    source: TupleOf[str] = ()
    """Files or folders of text or JSON lines to build the shards from; `python-stdlib` is this Python's own library."""
    tokenizer: str = "bytes"
    """`bytes`, or the path of a Hugging Face `tokenizer.json`."""
    document_mask: bool = False
    """Whether a document in a sequence is trained as if it were alone there: attention does not cross its borders, its
    positions start at 0, and no token predicts the next document's first one."""
    cache: str = ""
    """Folder on a local disk for blocks read from `s3://`, shared by the ranks of a machine."""
    cache_size: Bytes = 16 << 30
    """Maximum size of the cache."""
    options: dict[str, str] = Field(default_factory=dict)
    """Of `s3://`: `endpoint` of a server other than Amazon's, `region`, timeouts."""

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        if self.shards and self.sources:
            raise ValueError("`shards` must be omitted if there are `sources`\nname it as one of the `sources`")
        if not self.shards and not self.sources:
            raise ValueError(
                "`shards` must name a folder of token shards, or `sources` several of them"
                '\nadd `shards = "…"` to [data]'
            )
        if self.source and self.sources:
            raise ValueError(
                "`source` must be in the same table as the `shards` it builds\nmove it into one of the `sources`"
            )
        return self

    @property
    def datasets(self) -> tuple[DataSource, ...]:
        """The datasets, one or several."""
        return self.sources or (DataSource(shards=self.shards, source=self.source),)


class EvaluationSource(ShardSource):
    """A held-out data set; it has the tokenizer of `[data]`."""

    name: Name
    """What its loss is called in events, tables and charts."""


class EvaluationConfig(SpecModel):
    """Loss on held-out data, and samples: before the first step, every so many steps, and at the end of the run."""

    every: int = Field(default=0, ge=0, le=MAX_COUNT)
    """Steps between evaluations; 0 evaluates only at the end of the run."""
    tokens: PositiveInt = 1 << 20
    """Tokens to read of each data set, in sequences spread evenly over it; all of it if it has fewer."""
    data: TupleOf[EvaluationSource] = Field(default=(), max_length=1_000)
    """Held-out data sets, each with a loss of its own."""
    prompts: TupleOf[Annotated[str, Field(max_length=1 << 20)]] = Field(default=(), max_length=64)
    """Texts that the model continues with the tokens it finds most likely; an empty one begins a text of its own.

    The samples are in the run's folder and on its page. Every token takes a forward pass over a full sequence.
    """
    sample_tokens: PositiveInt = 64
    """Most tokens of a sample; together with its prompt it has at most `batch.length`."""


class BatchRampStage(SpecModel):
    """A smaller batch at the start of a run."""

    until: PositiveInt
    """Step after which the next stage begins; the last is followed by the full batch."""
    sequences: int = Field(ge=1, le=10**9)
    """Sequences of one optimizer step until then, over all ranks."""


class BatchConfig(SpecModel):
    """The global batch of one optimizer step, independent of the layout."""

    sequences: int = Field(ge=1, le=10**9)
    """Sequences of one optimizer step, over all ranks; after the `ramp`, if there is one."""
    length: SequenceLength
    """Tokens per sequence."""
    ramp: TupleOf[BatchRampStage] = Field(default=(), max_length=10_000)
    """Smaller batches at the start of the run; samples keep their order."""

    @property
    def tokens(self) -> int:
        """Tokens in one optimizer step; after the ramp, if there is one."""
        return self.sequences * self.length

    def sequences_at(self, cursor: int) -> int:
        """Sequences of the batch whose first sample is number `cursor`: a pure function, so it needs no state."""
        done = start = 0
        for stage in self.ramp:
            start += (stage.until - done) * stage.sequences
            done = stage.until
            if cursor < start:
                return stage.sequences
        return self.sequences

    def cursor_after(self, steps: int, start: int = 0) -> int:
        """The number of the first sample after so many steps, of which the first begins with sample `start`."""
        end, done = 0, 0
        for stage in self.ramp:
            end += (stage.until - done) * stage.sequences
            done = stage.until
            if start < end:
                of_stage = min(steps, -(-(end - start) // stage.sequences))
                start, steps = start + of_stage * stage.sequences, steps - of_stage
        return start + steps * self.sequences


class OptimizerGroup(SpecModel):
    """Settings of the parameters whose names match."""

    match: str
    """A pattern over names of parameters, such as `blocks.*.attention.*` or `embed.*`."""
    kind: OptimizerKind | None = None
    """Optimizer of these parameters; the usual one if omitted. `muon` is for matrices."""
    learning_rate_factor: float = Field(default=1.0, ge=0, le=1000, allow_inf_nan=False)
    """Their learning rate, as a factor of `learning_rate`; 0 freezes them."""
    weight_decay: float | None = Field(default=None, ge=0, le=1000)
    """Their weight decay, of vectors too; the usual one if omitted."""


class OptimizerConfig(SpecModel):
    """AdamW, or Muon for the matrices of layers and AdamW for the rest; no weight decay for vectors."""

    kind: OptimizerKind = "adamw"
    """`adamw` for all parameters, or `muon` for the matrices of layers and AdamW for embeddings, head and routers."""
    learning_rate: float = Field(default=3e-4, gt=0, le=1000)
    """Peak learning rate; [schedule] says how it rises and falls."""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    """Decay of the running mean of the gradients."""
    beta2: float = Field(default=0.95, ge=0, lt=1)
    """Decay of the running mean of their squares."""
    epsilon: float = Field(default=1e-8, gt=0, le=1)
    """Added to the root of the mean square, to avoid division by 0."""
    weight_decay: float = Field(default=0.1, ge=0, le=1000)
    """Weight decay of matrices, times the learning rate; norms and biases are not decayed."""
    clip: float = Field(default=1.0, ge=0, le=1e12)
    """Maximum norm of the global gradient; 0 disables clipping."""
    momentum: float = Field(default=0.95, ge=0, lt=1)
    """Of Muon: decay of the running mean of the gradients."""
    nesterov: bool = True
    """Of Muon: orthogonalize the gradient mixed with the running mean, not the mean alone."""
    newton_schulz_steps: int = Field(default=5, ge=1, le=99)
    """Of Muon: iterations that orthogonalize a matrix."""
    newton_schulz_dtype: Literal["bf16", "fp32"] = "bf16"
    """Of Muon: dtype of these iterations, and of what ranks send each other for them."""
    adjust_learning_rate: Literal["original", "match_rms_adamw"] = "match_rms_adamw"
    """Of Muon: scale updates to the size of AdamW's, so that one learning rate fits both, or as it did at first."""
    groups: TupleOf[OptimizerGroup] = Field(default=(), max_length=10_000)
    """Parameters with other settings; the last match wins."""

    @property
    def has_muon(self) -> bool:
        """Whether any parameter may be Muon's."""
        return self.kind == "muon" or any(group.kind == "muon" for group in self.groups)


class LRSchedule(SpecModel):
    """The learning rate over the run, as a factor of the optimizer's `learning_rate`."""

    kind: Literal["constant", "cosine", "linear", "wsd"] = "cosine"
    """Decay after the warm-up: none, half a cosine, linear, or at the end only (`wsd`)."""
    warmup: int = Field(default=0, ge=0, le=MAX_COUNT)
    """Steps of linear warm-up."""
    decay: int | None = Field(default=None, ge=0, le=MAX_COUNT)
    """Steps of decay at the end; for `wsd` only (warm-up, stable, decay). A tenth of the run if omitted."""
    shape: DecayShape = "linear"
    """Shape of that decay, for `wsd` only: `linear`, half a `cosine`, or `1-sqrt`, which falls fast at first."""
    final: float = Field(default=0.1, ge=0, le=1)
    """Factor at the end of the run."""


class LayerPrecision(SpecModel):
    """Precision of the modules whose names match."""

    match: str
    """A pattern over `embed`, `blocks.<layer>`, `blocks.<layer>.mlp.experts` and `head`, such as `blocks.[0-3]`."""
    compute: ComputeDtype | None = None
    """Dtype of their forward and backward passes; that of the run if omitted."""
    reduce: ComputeDtype = "fp32"
    """Dtype in which their gradients are summed over ranks."""
    matmul: MatmulFormat | None = None
    """Format of their matrix products; that of the run if omitted."""


class LossScaleConfig(SpecModel):
    """Scale of the loss where anything is fp16: halved by an overflow, doubled after enough steps without one."""

    initial: float = Field(default=65536.0, ge=1, le=2**24)
    """Scale at the start of the run: a power of 2."""
    growth_interval: PositiveInt = 2000
    """Steps without an overflow after which it doubles."""

    @model_validator(mode="after")
    def _power_of_two(self) -> Self:
        if not log2(self.initial).is_integer():
            near = 2 ** round(log2(self.initial))
            raise ValueError(
                f"`initial` must be a power of 2, so that scaling loses no bit, but is {self.initial}\ninitial = {near}"
            )
        return self


class PrecisionConfig(SpecModel):
    """Dtypes of compute and of gradient reduction; parameters and optimizer states are always in fp32."""

    compute: ComputeDtype = "fp32"
    """Dtype of the forward and backward passes."""
    reduce: ComputeDtype = "fp32"
    """Dtype in which gradients are summed over ranks."""
    matmul: MatmulFormat = "none"
    """Format of the matrix products of layers and experts: as `compute`, or quantized in blocks to `fp8` (fp32 scales)
    or `mxfp8` (power-of-two scales). Routers, norms, embeddings and head stay in `compute`."""
    block: int | None = Field(default=None, ge=8, le=4096)
    """Elements that share a scale; if omitted 128 for `fp8` and 32 for `mxfp8`, which are what chips multiply."""
    layers: TupleOf[LayerPrecision] = Field(default=(), max_length=10_000)
    """Groups of layers with another precision; the last match wins."""
    loss_scale: LossScaleConfig = LossScaleConfig()
    """Loss scaling; used if anything is fp16."""

    @property
    def uses_fp16(self) -> bool:
        """Whether anything is computed or reduced in fp16."""
        groups = [(self.compute, self.reduce), *((group.compute, group.reduce) for group in self.layers)]
        return any("fp16" in group for group in groups)

    @property
    def quantizes(self) -> bool:
        """Whether any matrix product is quantized."""
        return any(each not in (None, "none") for each in (self.matmul, *(group.matmul for group in self.layers)))

    def block_of(self, matmul: MatmulFormat) -> int:
        """Elements of a block in this format."""
        return self.block or MATMUL_BLOCKS[matmul]

    def peak_dtype(self, peaks: Container[str]) -> ComputeDtype | Literal["fp8"]:
        """Whose peak of a chip is the run's: fp8 if products are quantized and the chip states one, else `compute`'s.

        Beside activations of fp32 nothing runs at the peak of fp8.
        """
        return "fp8" if self.matmul != "none" and self.compute != "fp32" and "fp8" in peaks else self.compute

    @property
    def label(self) -> str:
        """The run's precision: `bf16`, `fp8 (bf16 elsewhere)`, or `bf16 (fp32 in blocks.0)` if groups differ."""
        main: str = self.compute
        others: list[str] = []
        if self.matmul != "none":
            main, others = self.matmul, [f"{self.compute} elsewhere"]
        for group in self.layers:
            compute, matmul = group.compute or self.compute, group.matmul or self.matmul
            if (compute, matmul) != (self.compute, self.matmul):
                others.append(f"{compute if matmul == 'none' else matmul} in {group.match}")
        return f"{main} ({', '.join(others)})" if others else main


class EmaConfig(SpecModel):
    """An exponential moving average of the parameters, beside them."""

    decay: float = Field(default=0.999, gt=0, lt=1)
    """Share of the average that stays in every step."""


class CheckpointConfig(SpecModel):
    """When and where to save, how many checkpoints to keep, and what to do if the store fails."""

    every: int = Field(default=0, ge=0, le=MAX_COUNT)
    """Steps between checkpoints; 0 saves only at the end of the run."""
    keep: int = Field(default=2, ge=1, le=10**9)
    """Number of newest checkpoints to keep; older ones are deleted once a newer one is verified."""
    store: str = ""
    """A folder or `s3://bucket/prefix` to save to, under the run's name; the run's folder if omitted."""
    options: dict[str, str] = Field(default_factory=dict)
    """Of an `s3://` store: `endpoint`, `region`, timeouts. Credentials are found as by the AWS tools."""
    near: str = ""
    """A folder on each host's local disk for a copy of what its ranks saved last, read before `store`."""
    peers: bool = False
    """Also replicate what a host saved last to another host's memory, read before any disk."""
    parity: int = Field(default=0, ge=0, le=4)
    """Parity files per `group` ranks' files: how many may be lost or corrupt and are still readable."""
    group: int = Field(default=8, ge=1, le=128)
    """Files that are protected together."""
    scrub: float = Field(default=24.0, ge=0, le=10**6)
    """Hours between idle-time reads of kept checkpoints, to find bit rot while it can be repaired; 0 never."""
    retries: int = Field(default=2, ge=0, le=8)
    """Retries of failed store operations: after 1 s, 4 s, 16 s and so on."""
    bandwidth: float = Field(default=0.0, ge=0, le=10**9)
    """Megabytes per second that a rank may write to `store` during training; 0 is unlimited."""
    stop_after: int = Field(default=0, ge=0, le=10**9)
    """Consecutive saves that may fail before the run stops; 0 never stops."""

    @model_validator(mode="after")
    def _known_store(self) -> Self:
        scheme, separator, _ = self.store.partition("://")
        if separator and scheme not in ("s3", "file"):
            raise ValueError(
                f"`store` must be a folder or s3://bucket/prefix, but is {self.store}"
                f"\n{scheme}:// is not supported; copy checkpoints there with another tool"
            )
        if self.options and scheme != "s3":
            raise ValueError("`options` must be omitted unless `store` is in s3://: they would be ignored\nremove them")
        return self


class MetricsConfig(SpecModel):
    """Where metrics go beside the run's own `events.jsonl` and TensorBoard files."""

    wandb: str = Field(default="", max_length=128)
    """Project of Weights & Biases; not used if empty. Needs `danlu[wandb]` and, online, the user's key."""
    wandb_mode: Literal["online", "offline"] = "online"
    """`offline` writes into the run's folder, for `wandb sync` later, from a host that reaches the service."""
    port: int = Field(default=0, ge=0, le=65535)
    """Port on the loopback interface of rank 0's host with Prometheus metrics and a feed of events; 0 is none."""


class Recipe(SpecModel):
    """What to train. A file's `model` table may name a catalog entry as its `base` and override single fields."""

    name: Name
    """Name of the run and of its folder under `runs/`; a number is added if that exists."""
    seed: int = Field(default=0, ge=0, lt=2**63)
    """Seed of initial values, of the order of samples and of dropout."""
    steps: PositiveInt
    """Optimizer steps of the run."""
    access: Access = "owner"
    """Who may read the run's folder, its checkpoints and their copies; only the owner may change them."""
    model: Annotated[
        Annotated[Model, Tag("described")] | Annotated[CustomModel, Tag("own")], Discriminator(_model_kind)
    ]
    """Shape of the model, or the code that builds it."""
    weights: str = ""
    """Folder of `danlu import hf` or of `danlu ckpt average` to start from, relative to the recipe; it gives the fields
    that `model` omits. A run's folder gives its newest checkpoint."""
    data: DataConfig
    """Training data."""
    batch: BatchConfig
    """The global batch."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """The optimizer and its settings."""
    schedule: LRSchedule = LRSchedule()
    """The learning rate over the run."""
    precision: PrecisionConfig = PrecisionConfig()
    """Dtypes; fp32 throughout if omitted."""
    ema: EmaConfig | None = None
    """An average of the parameters to export; none if omitted."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """When and where to save."""
    evaluation: EvaluationConfig = EvaluationConfig()
    """Held-out data and when to evaluate on it; no evaluation if omitted."""
    metrics: MetricsConfig = MetricsConfig()
    """Weights & Biases, Prometheus, a feed of events; none of them if omitted."""
    spikes: SpikeConfig = SpikeConfig()
    """What to do about a loss or gradient norm that jumps."""
    resilience: ResilienceConfig = ResilienceConfig()
    """What to do about ranks that die or hang."""

    @property
    def mtp(self) -> Mtp | None:
        """Multi-token prediction of the model; None without it, as for custom models."""
        return self.model.mtp if isinstance(self.model, Model) else None

    @property
    def decoder(self) -> Model:
        """The model's shape; only for a model that is described by it."""
        assert isinstance(self.model, Model)
        return self.model
