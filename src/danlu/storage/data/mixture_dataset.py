"""The samples of a run: one source or several by weight, each growing with appends."""

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, Self

import numpy as np

from danlu.spec import SpecError
from danlu.spec.mixture_weights import integer_weights
from danlu.spec.problem import problem_at
from danlu.spec.recipe import DataConfig
from danlu.storage.data.build import unigram_entropy
from danlu.storage.data.dataset_index import INDEX_FILE
from danlu.storage.data.mixture_sampler import MixtureSampler
from danlu.storage.data.open_shards import open_shards
from danlu.storage.data.shard_reader import dataset_problem
from danlu.storage.data.shuffle import IntArray, derive_seed
from danlu.storage.data.token_shards import OnWarning, ShuffledDataset, TokenShards, emit_warning
from danlu.storage.data.version_log import DatasetVersionEntry, DatasetVersionLog

_POLL_SECONDS = 0.2
_VISIBILITY_TIMEOUT = 60.0
"""Seconds that a machine's view of a shared folder may lag behind another's."""


class SampleLocation(NamedTuple):
    """Where a sample of a run comes from."""

    source: int
    source_index: int
    """Its index in the sequence of its source."""
    sample_id: int
    """Number n is the tokens from n · length on."""


VersionSwitch = tuple[int, tuple[int, ...]]
"""From this sample of the run on, these versions are read, one per source."""


class MixtureDataset:
    """An endless sequence of samples: a function of seed, index and version log alone."""

    def __init__(self, sources: Sequence[TokenShards], weights: Sequence[int], length: int, seed: int) -> None:
        """Reads the newest versions from the first sample on, unless `set_version_schedule` is called."""
        self.sources = list(sources)
        self.weights = tuple(weights)
        self.length, self.seed = length, seed
        self._mixture = MixtureSampler(weights, seed)
        self.version_schedule: list[VersionSwitch] = [(0, tuple(shards.newest_version for shards in sources))]
        self._build_datasets()

    @classmethod
    def from_recipe(
        cls, data: DataConfig, length: int, seed: int, *, check_sizes: bool = True, on_warning: OnWarning = emit_warning
    ) -> Self:
        """The data that a recipe names, with resolved paths; raises `SpecError` for what cannot be read."""
        sources = [
            open_shards(dataset.shards, data, check_sizes=check_sizes, on_warning=on_warning)
            for dataset in data.datasets
        ]
        return cls(sources, integer_weights([dataset.weight for dataset in data.datasets]), length, seed)

    @property
    def has_loss_mask(self) -> bool:
        """Whether the loss does not count all tokens of some source."""
        return any(shards.index.has_loss_mask for shards in self.sources)

    @property
    def end_of_text(self) -> int:
        """The token that ends a document; the data sets of a mixture have the same tokenizer."""
        return self.sources[0].index.end_of_text

    def read_samples(self, indices: IntArray) -> IntArray:
        """Samples at these indices, as rows of `length + 1` tokens: int64 [n, length + 1]."""
        return self._read_rows(indices, ShuffledDataset.read_samples)

    def read_words(self, indices: IntArray) -> IntArray:
        """The same with their marks (`token_marks`)."""
        return self._read_rows(indices, ShuffledDataset.read_words)

    def _read_rows(self, indices: IntArray, read: Callable[[ShuffledDataset, IntArray], IntArray]) -> IntArray:
        rows = np.empty((len(indices), self.length + 1), dtype=np.int64)
        sources, numbers = self._mixture.locate(np.asarray(indices, dtype=np.int64))
        for source in np.unique(sources):
            mine = np.flatnonzero(sources == source)
            rows[mine] = read(self._datasets[source], numbers[mine])
        return rows

    def locate(self, indices: IntArray) -> list[SampleLocation]:
        """Where the samples at these indices come from."""
        sources, indices_in_source = self._mixture.locate(np.asarray(indices, dtype=np.int64))
        return [
            SampleLocation(source, index, int(self._datasets[source].sample_ids(np.array([index]))[0]))
            for source, index in zip(sources.tolist(), indices_in_source.tolist(), strict=True)
        ]

    def epoch_of(self, source: int, index: int) -> int:
        """The epoch of a source that an index of its sequence falls in."""
        return self._datasets[source].shuffle.epoch_and_position(index)[0]

    def version_entry(self, cursor: int, versions: Sequence[int]) -> DatasetVersionEntry:
        """The log entry of a run that reads these versions from a sample on."""
        return DatasetVersionEntry(
            cursor=cursor,
            editions=tuple(versions),
            fingerprints=tuple(
                shards.index.fingerprint(version) if version <= shards.newest_version else ""
                for shards, version in zip(self.sources, versions, strict=True)
            ),
            weights=self.weights,
            length=self.length,
        )

    def newest_versions(self) -> tuple[int, ...]:
        """The newest version of every source, appends included; not read until applied.

        They are durable when this returns, so that a log entry about them is not durable first.
        """
        for shards in self.sources:
            shards.refresh()
            shards.reader.sync()
        return tuple(shards.newest_version for shards in self.sources)

    def set_version_schedule(self, schedule: Sequence[VersionSwitch]) -> None:
        """Read these versions from these samples on; waits for one that this machine does not see yet."""
        for source, shards in enumerate(self.sources):
            _wait_for_version(shards, max(versions[source] for _, versions in schedule))
        self.version_schedule = list(schedule)
        self._build_datasets()

    @property
    def baseline_loss(self) -> float | None:
        """Entropy in nats of the tokens the run sees.

        None if one of several sources has no token counts, or if the loss does not count all tokens.
        """
        if self.has_loss_mask:
            return None
        pairs = list(zip(self.sources, self.version_schedule[-1][1], strict=True))
        described = [shards.index.all_versions[version] for shards, version in pairs]
        if len(described) == 1:
            return described[0].unigram_loss
        if not all(version.counts for version in described):
            return None
        counts = [shards.token_counts(version) for shards, version in pairs]
        mixed = np.zeros(max(map(len, counts)))
        for weight, count in zip(self.weights, counts, strict=True):
            mixed[: len(count)] += weight * count / count.sum()
        return unigram_entropy(mixed)

    def _build_datasets(self) -> None:
        several = len(self.sources) > 1
        self._datasets = [
            ShuffledDataset(
                shards,
                self.length,
                derive_seed(self.seed, "source", source) if several else self.seed,
                self._source_versions(source),
            )
            for source, shards in enumerate(self.sources)
        ]

    def _source_versions(self, source: int) -> list[tuple[int, int]]:
        """From which sample of the source on which of its versions is read."""
        return [
            (self._mixture.count_before(source, cursor), versions[source]) for cursor, versions in self.version_schedule
        ]


def update_version_log(log: DatasetVersionLog, data: MixtureDataset, cursor: int) -> list[VersionSwitch]:
    """Which versions a run that continues at sample `cursor` reads from which sample on, as recorded and with appends.

    What was appended since the last entry is read from `cursor` on; that is durable before this returns. Called by one
    process of a run, which sends the result to the others.
    """
    entries = log.read()
    if not entries and cursor:  # begun by a release without a log, when a data set had one version
        log.append(data.version_entry(0, [0] * len(data.sources)))
        entries = log.read()
    newest = data.newest_versions()
    if entries:
        _check_same_data(log, entries[-1], data)
    if not entries or newest != entries[-1].editions:
        start = max(cursor, entries[-1].cursor) if entries else cursor
        log.append(data.version_entry(start, newest))
        entries = log.read()
    return [(entry.cursor, entry.editions) for entry in entries]


def _check_same_data(log: DatasetVersionLog, recorded: DatasetVersionEntry, data: MixtureDataset) -> None:
    """Raise if the data is not what the log records."""
    if len(recorded.editions) != len(data.sources) or recorded.weights != data.weights:
        message = f"are {list(data.weights)}, but the run began with {list(recorded.weights)}"
        raise SpecError([problem_at(log.path, 1, "weights", message, _RESTORE_SETTING_HINT)])
    if recorded.length != data.length:
        message = f"is {data.length}, but the run began with {recorded.length}"
        raise SpecError([problem_at(log.path, 1, "batch.length", message, _RESTORE_SETTING_HINT)])
    now = data.version_entry(recorded.cursor, recorded.editions)
    problems = [
        dataset_problem(
            shards.location,
            INDEX_FILE,
            "data",
            "is not the data set that the run began with",
            _RESTORE_DATA_HINT,
        )
        for shards, was, found in zip(data.sources, recorded.fingerprints, now.fingerprints, strict=True)
        if was != found
    ]
    if problems:
        raise SpecError(problems)


_RESTORE_SETTING_HINT = "restore it, or start a new run: the sample order depends on it"
_RESTORE_DATA_HINT = "restore the data set, or start a new run"


def _wait_for_version(shards: TokenShards, version: int) -> None:
    deadline = time.monotonic() + _VISIBILITY_TIMEOUT
    while shards.newest_version < version:
        if time.monotonic() > deadline:
            seen = shards.newest_version + 1
            message = f"has {seen} versions visible on this host, but another rank reads number {version}"
            hint = "all ranks must see the same folder; check the mount on this host"
            raise SpecError([dataset_problem(shards.location, INDEX_FILE, "editions", message, hint)])
        time.sleep(_POLL_SECONDS)
        shards.refresh()
