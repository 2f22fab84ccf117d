"""The samples of a run: one source or several by weight, each growing when it is appended to."""

import time
from collections.abc import Sequence
from typing import NamedTuple, Self

import numpy as np

from danlu.spec import SpecError
from danlu.spec.mixing import whole_weights
from danlu.spec.problem import problem_at
from danlu.spec.recipe import Data
from danlu.storage.build import entropy
from danlu.storage.index import INDEX
from danlu.storage.mixture import Mixture
from danlu.storage.open_shards import open_shards
from danlu.storage.order import Ints, derived_seed
from danlu.storage.shard_files import problem_in
from danlu.storage.taken_up import TakenUp, TakenUpLog
from danlu.storage.tokens import Dataset, OnWarning, TokenShards, python_warning

_POLL_SECONDS = 0.2
_PATIENCE_SECONDS = 60.0
"""How long a machine's view of a shared folder may lag behind another's."""


class SamplePlace(NamedTuple):
    """Where a sample of a run comes from."""

    source: int
    place: int
    """Its index in the sequence of its source."""
    number: int
    """Number n is the tokens from n · length on."""


Editions = tuple[int, tuple[int, ...]]
"""From this sample of the run on, these editions count, one a source."""


class TrainingData:
    """An endless sequence of samples: which one stands at an index is a function of seed, index and promises alone."""

    def __init__(self, sources: Sequence[TokenShards], weights: Sequence[int], length: int, seed: int) -> None:
        """The newest editions count from the first sample on, unless `take_up` says otherwise."""
        self.sources = list(sources)
        self.weights = tuple(weights)
        self.length, self.seed = length, seed
        self._mixture = Mixture(weights, seed)
        self.taken: list[Editions] = [(0, tuple(shards.newest for shards in sources))]
        self._order()

    @classmethod
    def of(
        cls, data: Data, length: int, seed: int, *, check_sizes: bool = True, on_warning: OnWarning = python_warning
    ) -> Self:
        """The data that a recipe names, with paths resolved; raises `SpecError` for what cannot be read."""
        sources = [
            open_shards(part.shards, data, check_sizes=check_sizes, on_warning=on_warning) for part in data.parts
        ]
        return cls(sources, whole_weights([part.weight for part in data.parts]), length, seed)

    def at(self, indices: Ints) -> Ints:
        """Samples at these indices, as rows of `length + 1` tokens: int64 [n, length + 1]."""
        rows = np.empty((len(indices), self.length + 1), dtype=np.int64)
        sources, numbers = self._mixture.places(np.asarray(indices, dtype=np.int64))
        for source in np.unique(sources):
            mine = np.flatnonzero(sources == source)
            rows[mine] = self._sets[source].at(numbers[mine])
        return rows

    def places(self, indices: Ints) -> list[SamplePlace]:
        """Where the samples at these indices come from."""
        sources, places = self._mixture.places(np.asarray(indices, dtype=np.int64))
        return [
            SamplePlace(source, place, int(self._sets[source].numbers(np.array([place]))[0]))
            for source, place in zip(sources.tolist(), places.tolist(), strict=True)
        ]

    def epoch(self, source: int, place: int) -> int:
        """The epoch of a source that an index of its sequence falls in."""
        return self._sets[source].order.place(place)[0]

    def promise(self, cursor: int, editions: Sequence[int]) -> TakenUp:
        """What is promised by a run that reads these editions from a sample on."""
        return TakenUp(
            cursor=cursor,
            editions=tuple(editions),
            fingerprints=tuple(
                shards.index.fingerprint(edition) if edition <= shards.newest else ""
                for shards, edition in zip(self.sources, editions, strict=True)
            ),
            weights=self.weights,
            length=self.length,
        )

    def newest(self) -> tuple[int, ...]:
        """The newest edition of every source, whatever was appended meanwhile; none is read before it is taken up."""
        for shards in self.sources:
            shards.refresh()
        return tuple(shards.newest for shards in self.sources)

    def take_up(self, taken: Sequence[Editions]) -> None:
        """Read these editions from these samples on; one that this machine does not see yet is waited for."""
        for source, shards in enumerate(self.sources):
            _await_edition(shards, max(editions[source] for _, editions in taken))
        self.taken = list(taken)
        self._order()

    @property
    def baseline(self) -> float | None:
        """Entropy in nats of the tokens the run sees; None where one source of several does not count its own."""
        pairs = list(zip(self.sources, self.taken[-1][1], strict=True))
        described = [shards.index.all_editions[edition] for shards, edition in pairs]
        if len(described) == 1:
            return described[0].unigram_loss
        if not all(edition.counts for edition in described):
            return None
        counts = [shards.counts(edition) for shards, edition in pairs]
        mixed = np.zeros(max(map(len, counts)))
        for weight, count in zip(self.weights, counts, strict=True):
            mixed[: len(count)] += weight * count / count.sum()
        return entropy(mixed)

    def _order(self) -> None:
        several = len(self.sources) > 1
        self._sets = [
            Dataset(
                shards,
                self.length,
                derived_seed(self.seed, "source", source) if several else self.seed,
                self._editions(source),
            )
            for source, shards in enumerate(self.sources)
        ]

    def _editions(self, source: int) -> list[tuple[int, int]]:
        """From which sample of the source on which of its editions counts."""
        return [(self._mixture.before(source, cursor), editions[source]) for cursor, editions in self.taken]


def keep_promises(log: TakenUpLog, data: TrainingData, cursor: int) -> list[Editions]:
    """Which editions a run that goes on from sample `cursor` reads from where on: what it promised, and what is new.

    What was appended since the last promise counts from `cursor` on, which is put on disk before this returns. For one
    process of a run; the others are told.
    """
    promises = log.read()
    if not promises and cursor:  # begun by a release that promised nothing, when a data set had one edition
        log.add(data.promise(0, [0] * len(data.sources)))
        promises = log.read()
    newest = data.newest()
    if promises:
        _refuse_other_data(log, promises[-1], data)
    if not promises or newest != promises[-1].editions:
        start = max(cursor, promises[-1].cursor) if promises else cursor
        log.add(data.promise(start, newest))
        promises = log.read()
    return [(promise.cursor, promise.editions) for promise in promises]


def _refuse_other_data(log: TakenUpLog, promised: TakenUp, data: TrainingData) -> None:
    """Raise if what a run is about to read is not what it promised to read."""
    if len(promised.editions) != len(data.sources) or promised.weights != data.weights:
        message = f"are {list(data.weights)}, but the run began with {list(promised.weights)}"
        raise SpecError([problem_at(log.path, 1, "weights", message, _OTHER_RUN)])
    if promised.length != data.length:
        message = f"is {data.length}, but the run began with {promised.length}"
        raise SpecError([problem_at(log.path, 1, "batch.length", message, _OTHER_RUN)])
    now = data.promise(promised.cursor, promised.editions)
    problems = [
        problem_in(shards.where, INDEX, "data", "is another data set than the one the run began with", _PUT_BACK)
        for shards, was, found in zip(data.sources, promised.fingerprints, now.fingerprints, strict=True)
        if was != found
    ]
    if problems:
        raise SpecError(problems)


_OTHER_RUN = "put it back, or start another run: a sample's place in the order depends on it"
_PUT_BACK = "put the data set back, or start another run"


def _await_edition(shards: TokenShards, edition: int) -> None:
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while shards.newest < edition:
        if time.monotonic() > deadline:
            message = f"has {shards.newest + 1} editions here, but another rank reads number {edition}"
            hint = "the ranks must see one folder; look at the mount of this machine"
            raise SpecError([problem_in(shards.where, INDEX, "editions", message, hint)])
        time.sleep(_POLL_SECONDS)
        shards.refresh()
