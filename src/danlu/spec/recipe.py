"""What to train: model, data, batch, optimiser, precision, steps."""

from typing import Annotated, Any, Literal, Self

from pydantic import Discriminator, Field, Tag, model_validator

from danlu.spec.description import Bytes, Count, Description, Many
from danlu.spec.model import Model
from danlu.spec.own_model import OwnModel

MODEL_KINDS = ("described", "own")
"""The two ways to say a model: by its shape, or by what makes it."""


def _model_kind(value: Any) -> str:
    """Which of the two a table is meant to be, even if a setting is misspelt."""
    if isinstance(value, dict):
        own, described = set(OwnModel.model_fields), set(Model.model_fields)
        return "own" if value.keys() & (own - described) else "described"
    return "own" if isinstance(value, OwnModel) else "described"


ComputeDtype = Literal["fp32", "bf16", "fp16"]


def has_experts(model: Model | OwnModel) -> bool:
    """Whether a model has expert layers that Danlu spreads over ranks."""
    return isinstance(model, Model) and model.moe is not None


class DataSource(Description):
    """One data set of a mixture."""

    shards: str
    """Folder of token shards, relative to the recipe, or `s3://bucket/prefix`."""
    weight: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    """Its share of the samples, as a part of the sum of all weights."""
    source: Many[str] = ()
    """Files or folders of text or JSON lines to build the shards from; `python-stdlib` is this Python's own library."""


class Data(Description):
    """Token shards, or several mixed by weight, and what to build them from when a folder does not exist yet."""

    shards: str = ""
    """Folder of token shards, relative to the recipe, or `s3://bucket/prefix`."""
    sources: Many[DataSource] = ()
    """Several data sets instead, each with its weight; the tokenizer is one for all."""
    source: Many[str] = ()
    """Files or folders of text or JSON lines to build the shards from; `python-stdlib` is this Python's own library."""
    tokenizer: str = "bytes"
    """`bytes`, or the path of a Hugging Face `tokenizer.json`."""
    cache: str = ""
    """Folder on a local disk for blocks read from `s3://`, shared by the ranks of a machine."""
    cache_size: Bytes = 16 << 30
    """Most bytes the cache takes."""
    options: dict[str, str] = Field(default_factory=dict)
    """Of `s3://`: `endpoint` of a server that is not Amazon's, `region`, timeouts."""

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        if self.shards and self.sources:
            raise ValueError("`shards` must be left out where there are `sources`\nname it as one of the `sources`")
        if not self.shards and not self.sources:
            raise ValueError(
                "`shards` must name a folder of token shards, or `sources` several of them"
                '\nadd `shards = "…"` to [data]'
            )
        if self.source and self.sources:
            raise ValueError("`source` must stand beside the `shards` it builds\nmove it into one of the `sources`")
        return self

    @property
    def parts(self) -> tuple[DataSource, ...]:
        """The data sets, one or several."""
        return self.sources or (DataSource(shards=self.shards, source=self.source),)


class Batch(Description):
    """The global batch of one optimiser step, whatever the layout."""

    sequences: Count
    length: Count
    """Tokens a sequence."""

    @property
    def tokens(self) -> int:
        """Tokens in one optimiser step."""
        return self.sequences * self.length


class Optimizer(Description):
    """AdamW; weight decay spares vectors (norms and biases)."""

    learning_rate: float = Field(default=3e-4, gt=0)
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.95, ge=0, lt=1)
    epsilon: float = Field(default=1e-8, gt=0)
    weight_decay: float = Field(default=0.1, ge=0)
    clip: float = Field(default=1.0, ge=0)
    """Largest norm of the global gradient; 0 does not clip."""


class Schedule(Description):
    """The learning rate over the run, as a factor of the optimiser's `learning_rate`."""

    kind: Literal["constant", "cosine", "linear", "wsd"] = "cosine"
    warmup: int = Field(default=0, ge=0)
    """Steps of linear warm-up."""
    decay: int | None = Field(default=None, ge=0)
    """Steps of decay at the end; for `wsd` only (warm-up, stable, decay). A tenth of the run when left out."""
    final: float = Field(default=0.1, ge=0, le=1)
    """Factor at the end of the run."""


class LayerPrecision(Description):
    """Precision of the modules whose names match."""

    match: str
    """A pattern over `embed`, `blocks.<layer>`, `blocks.<layer>.mlp.experts` and `head`, such as `blocks.[0-3]`."""
    compute: ComputeDtype
    reduce: ComputeDtype = "fp32"


class Precision(Description):
    """Dtypes of compute and of gradient reduction; parameters and optimiser states are always kept in fp32."""

    compute: ComputeDtype = "fp32"
    reduce: ComputeDtype = "fp32"
    layers: Many[LayerPrecision] = ()
    """Groups of layers that depart from the above; the last match wins."""


class Checkpoint(Description):
    """When to save, where to, how many to keep, and what a failing store may cost."""

    every: int = Field(default=0, ge=0)
    """Steps between checkpoints; 0 saves only at the end of the run."""
    keep: Count = 2
    """Newest checkpoints kept; older ones go once a newer one was written and read back whole."""
    store: str = ""
    """A folder or `s3://bucket/prefix` to save to, under the run's name; the run's own folder if left out."""
    options: dict[str, str] = Field(default_factory=dict)
    """Of an `s3://` store: `endpoint`, `region`, timeouts. Credentials are found where the AWS tools look."""
    near: str = ""
    """A folder on each host's own disk for a second copy of what its ranks saved last, read before `store`."""
    peers: bool = False
    """Whether a copy of what a host saved last goes to another host's memory too, and is read before any disk."""
    parity: int = Field(default=0, ge=0, le=4)
    """How many of every `group` ranks' files may be lost or rotten and are still read; each costs a file's room."""
    group: int = Field(default=8, ge=1, le=128)
    """Files that are protected together."""
    scrub: float = Field(default=24.0, ge=0)
    """Hours after which kept checkpoints are read again in idle time, to find rot while it can be mended; 0 never."""
    retries: int = Field(default=2, ge=0, le=8)
    """Further tries of what a store refuses: after 1 s, 4 s, 16 s and so on."""
    bandwidth: float = Field(default=0.0, ge=0)
    """Megabytes a second that a rank may write to `store` while training goes on; 0 is as fast as it takes them."""
    stop_after: int = Field(default=0, ge=0)
    """Saves in a row that may fail before the run stops; 0 trains on without."""

    @model_validator(mode="after")
    def _known_store(self) -> Self:
        scheme, separator, _ = self.store.partition("://")
        if separator and scheme not in ("s3", "file"):
            raise ValueError(
                f"`store` must be a folder or s3://bucket/prefix, but is {self.store}"
                f"\n{scheme}:// is not known here; copy checkpoints there with a tool of its own"
            )
        if self.options and scheme != "s3":
            raise ValueError(
                "`options` must be left out unless `store` is in s3://: they would be ignored\nremove them"
            )
        return self


class Recipe(Description):
    """What to train. A file's `model` table may name a catalogue entry as its `base` and change single fields."""

    name: str
    seed: int = Field(default=0, ge=0)
    steps: Count
    model: Annotated[Annotated[Model, Tag("described")] | Annotated[OwnModel, Tag("own")], Discriminator(_model_kind)]
    weights: str = ""
    """Folder of `danlu import hf` to start from, relative to the recipe; what `model` leaves out is taken from it."""
    data: Data
    batch: Batch
    optimizer: Optimizer = Optimizer()
    schedule: Schedule = Schedule()
    precision: Precision = Precision()
    checkpoint: Checkpoint = Checkpoint()

    @property
    def decoder(self) -> Model:
        """The model's shape; only asked for where the model is described by it."""
        assert isinstance(self.model, Model)
        return self.model
