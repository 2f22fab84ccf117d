"""Text into token shards, in one pass and in the memory of one batch of documents."""

import fcntl
import hashlib
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from danlu.spec import Problem, SpecError
from danlu.spec.problem import problem_at
from danlu.storage.build_journal import BuildJournal, Progress
from danlu.storage.index import INDEX, Edition, Index, token_dtype
from danlu.storage.packing import Encode, Packed, pack_here
from danlu.storage.shard_files import problem_in
from danlu.storage.shard_writer import ShardWriter
from danlu.storage.source import PYTHON_STDLIB, Documents, source_name
from danlu.storage.tokenizer import Tokenizer
from danlu.storage.tokens import OnProgress, TokenShards, no_progress

SHARD_TOKENS = 1 << 27
"""A quarter of a GiB in two bytes a token."""

_NOTE_SHARE = 20  # a note takes longer the more shards there are: no more than a twentieth of the time goes to notes

OnNote = Callable[[str], None]


@dataclass(frozen=True)
class Built:
    """What a build made, and what it left out."""

    index: Index
    seconds: float
    left_out: Mapping[str, int]
    """Documents and files that are not in the shards, by reason."""
    examples: tuple[Problem, ...]
    """The first few bad ones."""
    resumed: int = 0
    """Shards that an earlier build, which was broken off, had made already."""


def build(
    sources: Sequence[str],
    folder: Path,
    tokenizer: Tokenizer,
    on_progress: OnProgress = no_progress,
    *,
    field: str = "text",
    shard_tokens: int = SHARD_TOKENS,
    skip_bad: bool = False,
    force: bool = False,
    append: bool = False,
    encode: Encode | None = None,
    on_note: OnNote = lambda note: None,
) -> Built:
    """Write the token shards of `sources` to `folder`, or behind those there; the same sources give the same bytes.

    A source is a file, a folder, or `python-stdlib`. Paths are taken as they are: a caller that
    read them from a recipe resolves them first. Nothing counts as a data set before the last byte is on disk. A build
    that was broken off goes on behind the last shard it completed when it is started again with the same sources.
    """
    started = time.monotonic()
    if shard_tokens < 1:
        raise ValueError(f"`shard_tokens` must be 1 or more, but is {shard_tokens} instead")
    _refuse_own_output(sources, folder)
    documents = Documents(sources, field=field, skip_bad=skip_bad)
    request = _request(documents, tokenizer, field, shard_tokens, append)
    folder.mkdir(parents=True, exist_ok=True)
    with _alone_in(folder):
        journal = BuildJournal(folder)
        progress = journal.read()
        if progress is not None and progress.index is not None:  # it was broken off while its files got their names
            index = journal.finish(progress)
            if progress.request == request:
                return _built(index, started, progress, len(progress.shards))
            progress = None
        base = TokenShards.open(folder, check_sizes=False) if append else None
        if base is None:
            _refuse_to_replace(folder, force)
        else:
            _refuse_other_tokenizer(base, tokenizer)
            if journal.is_done(request, base.index):
                on_note("these sources are the newest edition already: nothing is added")
                return Built(base.index, time.monotonic() - started, {}, ())
        progress = _usable(journal, progress, request, base, on_note)
        resumed = len(progress.shards)
        work = _Work(journal, tokenizer, shard_tokens, base, progress)
        documents = Documents(sources, field=field, skip_bad=skip_bad, place=progress.place)
        packed = (encode or pack_here(tokenizer))(documents)
        progress = work.run(documents, packed, on_progress, sources)
        return _built(journal.finish(progress), started, progress, resumed)


def entropy(counts: NDArray[np.int64] | NDArray[np.float64]) -> float:
    """Entropy in nats of the distribution these counts or shares describe."""
    share = counts[counts > 0] / counts.sum()
    return max(0.0, float(-(share * np.log(share)).sum()))


class _Work:
    """One build from the place where it stands to its last shard."""

    def __init__(
        self,
        journal: BuildJournal,
        tokenizer: Tokenizer,
        shard_tokens: int,
        base: TokenShards | None,
        progress: Progress,
    ) -> None:
        self._journal, self._tokenizer, self._base, self._progress = journal, tokenizer, base, progress
        self._next_note = 0.0
        counts = journal.read_counts(progress) if progress.shards else self._first_counts()
        assert counts is not None
        first = len(base.index.shards) if base else 0
        dtype = token_dtype(tokenizer.vocabulary)
        self._writer = ShardWriter(journal.folder, dtype, shard_tokens, counts, first, progress.shards)

    def run(
        self,
        documents: Documents,
        packed: Iterator[Packed],
        on_progress: OnProgress,
        sources: Sequence[str],
    ) -> Progress:
        """Write all that is left; what to put in place then."""
        try:
            skip = self._progress.skip
            for group in packed:
                self._write(group, skip)
                on_progress(documents.done, documents.bytes)
                skip = 0
            self._writer.finish()
        except BaseException:
            self._writer.abandon()
            self._journal.clean(self._progress if self._progress.shards else None)
            raise
        if not self._writer.shards:
            self._journal.clean(None)
            raise SpecError([_empty(sources, documents)])
        left = {"left_out": dict(documents.left_out.counts), "examples": documents.left_out.examples}
        return self._note(left | {"stage": "placing" if self._base else "clearing"}, sources)

    def _write(self, group: Packed, skip: int) -> None:
        """Write a group, without the first `skip` tokens of its first document."""
        starts = [0, *group.ends[:-1].tolist()]

        def closed(done: int) -> None:
            if time.monotonic() < self._next_note:
                return
            # The last document that begins before the border; where the border is its end, all of it is skipped.
            number = bisect_left(starts, done + skip) - 1
            at = group.places[number]
            place = {"file": at.file, "line": at.line, "skip": done + skip - starts[number]}
            self._note(place | {"left_out": dict(at.left_out or {}), "examples": at.examples})

        self._writer.write(group.tokens[skip:], group.ends - skip, closed)

    def _note(self, changes: Mapping[str, object], sources: Sequence[str] | None = None) -> Progress:
        """Put down what is done; with `sources`, that all of it is."""
        began = time.monotonic()
        self._writer.sync()
        shards = tuple(self._writer.shards)
        counts = self._journal.write_counts(shards, self._writer.counts)
        index = None if sources is None else self._index(sources, counts)
        done = {"shards": shards, "counts": counts, "index": index}
        self._progress = self._progress.model_copy(update=dict(changes) | done)
        self._journal.write(self._progress)
        ended = time.monotonic()
        self._next_note = ended + _NOTE_SHARE * (ended - began)
        return self._progress

    def _index(self, sources: Sequence[str], counts_hash: str) -> Index:
        tokenizer, counts, base = self._tokenizer, self._writer.counts, self._base.index if self._base else None
        shards = (*(base.shards if base else ()), *self._writer.shards)
        edition = Edition(
            shards=len(shards),
            tokens=int(counts.sum()),
            documents=(base.documents if base else 0) + sum(shard.documents for shard in self._writer.shards),
            unigram_loss=entropy(counts),
            counts=counts_hash,
        )
        return Index(
            tokenizer=tokenizer.name,
            vocabulary=tokenizer.vocabulary,
            end_of_text=tokenizer.end_of_text,
            dtype=token_dtype(tokenizer.vocabulary),
            tokens=edition.tokens,
            documents=edition.documents,
            unigram_loss=edition.unigram_loss,
            sources=(*(base.sources if base else ()), *(source_name(source) for source in sources)),
            shards=shards,
            editions=(*(base.all_editions if base else ()), edition),
        )

    def _first_counts(self) -> NDArray[np.int64]:
        if self._base is None:
            return np.zeros(self._tokenizer.vocabulary, dtype=np.int64)
        return self._base.counts(self._base.newest)


def _request(documents: Documents, tokenizer: Tokenizer, field: str, shard_tokens: int, append: bool) -> str:
    """A hash of what decides the bytes. Whether bad lines are left out does not: one that was kept was not bad."""
    said = (documents.identity, tokenizer.name, tokenizer.end_of_text, field, shard_tokens, append)
    return hashlib.sha256(repr(said).encode()).hexdigest()


def _usable(
    journal: BuildJournal, progress: Progress | None, request: str, base: TokenShards | None, on_note: OnNote
) -> Progress:
    """The progress to go on with; that of another build is said to be lost, and removed."""
    fingerprint = base.index.fingerprint(base.newest) if base else ""
    fresh = Progress(
        request=request, base=fingerprint, stage="writing", shards=(), counts="", file=0, line=0, skip=0,
        left_out={}, examples=(),
    )  # fmt: skip
    why = ""
    if progress is not None and (progress.request, progress.base) != (request, fingerprint):
        why = "it had other sources or settings, or a source has changed since"
    elif progress is not None and progress.shards and journal.read_counts(progress) is None:
        why = "the counts of its tokens are gone"
    if progress is not None and why:
        on_note(f"{len(progress.shards)} shards of a build that was broken off are dropped: {why}")
        progress = None
    journal.clean(progress)
    return progress or fresh


def _built(index: Index, started: float, progress: Progress, resumed: int) -> Built:
    return Built(index, time.monotonic() - started, progress.left_out, progress.examples, resumed)


def _refuse_own_output(sources: Sequence[str], folder: Path) -> None:
    inside = [
        source
        for source in sources
        if source != PYTHON_STDLIB and folder.resolve().is_relative_to(Path(source).resolve())
    ]
    if inside:
        message = f"lies inside its own source {inside[0]}, so that the next build would read the shards as text"
        raise SpecError([problem_at(folder, 1, "output", message, "choose a folder outside it")])


def _empty(sources: Sequence[str], documents: Documents) -> Problem:
    left_out = ", ".join(f"{count} {reason}" for reason, count in sorted(documents.left_out.counts.items())) or "none"
    return problem_at(Path(" ".join(sources)), 1, "source", f"holds no document (left out: {left_out})")


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Hold the folder against a second build; the lock falls with the process, so that a killed build leaves none."""
    with (folder / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            message = "is being written by another build"
            raise SpecError(
                [problem_at(folder, 1, "output", message, "wait for it, or choose another folder")]
            ) from None
        except OSError as error:
            message = f"cannot be locked against a second build: {error.strerror}"
            suggestion = "build on a file system with locks, and copy the folder"
            raise SpecError([problem_at(folder, 1, "output", message, suggestion)]) from None
        yield


def _refuse_to_replace(folder: Path, force: bool) -> None:
    if (folder / INDEX).exists() and not force:
        message = "already holds a data set"
        hint = "choose another folder, --force to replace it, or `danlu data append` to add to it"
        raise SpecError([problem_at(folder, 1, "output", message, hint)])


def _refuse_other_tokenizer(base: TokenShards, tokenizer: Tokenizer) -> None:
    index = base.index
    if (index.tokenizer, index.end_of_text) != (tokenizer.name, tokenizer.end_of_text):
        message = f'was built with tokenizer "{index.tokenizer}", but "{tokenizer.name}" is to be appended'
        hint = "give --tokenizer and --end-of-text as they were, or build another data set and mix the two by weight"
        raise SpecError([problem_in(base.where, INDEX, "tokenizer", message, hint)])
