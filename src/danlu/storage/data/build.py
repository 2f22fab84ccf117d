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
from danlu.storage.data.build_journal import BuildJournal, BuildProgress
from danlu.storage.data.chat_template import ChatTemplate
from danlu.storage.data.dataset_index import INDEX_FILE, DatasetIndex, DatasetVersion, word_dtype
from danlu.storage.data.document_reader import DocumentFormat
from danlu.storage.data.documents import PYTHON_STDLIB, DocumentStream, source_label
from danlu.storage.data.shard_reader import dataset_problem
from danlu.storage.data.shard_writer import ShardWriter
from danlu.storage.data.token_shards import OnProgress, TokenShards, ignore_progress
from danlu.storage.data.tokenization import TokenizedBatch, TokenizeFn, local_tokenize_fn
from danlu.storage.data.tokenizer import Tokenizer
from danlu.storage.store.atomic_files import make_dirs_durable

DEFAULT_SHARD_TOKENS = 1 << 27
"""A quarter of a GiB at two bytes per token."""

# Recording progress takes longer the more shards there are: at most a twentieth of the time is spent on it.
_PROGRESS_OVERHEAD_DIVISOR = 20

OnMessage = Callable[[str], None]


@dataclass(frozen=True)
class BuildResult:
    """What a build wrote, and what it skipped."""

    index: DatasetIndex
    seconds: float
    skipped: Mapping[str, int]
    """Documents and files that are not in the shards, by reason."""
    skipped_examples: tuple[Problem, ...]
    """The first few bad ones."""
    resumed_shards: int = 0
    """Shards reused from an interrupted build."""


def build_dataset(
    sources: Sequence[str],
    folder: Path,
    tokenizer: Tokenizer,
    on_progress: OnProgress = ignore_progress,
    *,
    field: str = "text",
    template: ChatTemplate | None = None,
    shard_tokens: int = DEFAULT_SHARD_TOKENS,
    skip_bad: bool = False,
    force: bool = False,
    append: bool = False,
    encode: TokenizeFn | None = None,
    on_note: OnMessage = lambda note: None,
) -> BuildResult:
    """Write the token shards of `sources` to `folder`, or after those in it; the same sources give the same bytes.

    A source is a file, a folder, or `python-stdlib`; with a chat `template` JSON lines with messages in `field`. Paths
    are used as given: a caller that read them from a recipe resolves them first. It is no data set before the last byte
    is durable. An interrupted build resumes after its last complete shard when it is rerun with the same sources.
    """
    started = time.monotonic()
    if shard_tokens < 1:
        raise ValueError(f"`shard_tokens` must be 1 or more, but is {shard_tokens} instead")
    _check_output_outside_sources(sources, folder)
    form = DocumentFormat(field, template)
    documents = DocumentStream(sources, form=form, skip_bad=skip_bad)
    request = _request_hash(documents, tokenizer, shard_tokens, append)
    make_dirs_durable(folder)
    with _build_lock(folder):
        journal = BuildJournal(folder)
        progress = journal.read()
        if progress is not None and progress.index is not None:  # interrupted while its files were renamed
            index = journal.commit(progress)
            if progress.request == request:
                return _build_result(index, started, progress, len(progress.shards))
            progress = None
        base = TokenShards.open(folder, check_sizes=False) if append else None
        if base is None:
            _check_overwrite_allowed(folder, force)
        else:
            _check_same_tokenizer(base, tokenizer)
            _check_same_template(base, template)
            if journal.is_up_to_date(request, base.index):
                on_note("these sources are already the newest version: nothing to append")
                return BuildResult(base.index, time.monotonic() - started, {}, ())
        progress = _resumable_progress(journal, progress, request, base, on_note)
        resumed = len(progress.shards)
        job = _BuildJob(journal, tokenizer, template, shard_tokens, base, progress)
        documents = DocumentStream(sources, form=form, skip_bad=skip_bad, position=progress.resume_position)
        batches = (encode or local_tokenize_fn(tokenizer))(documents)
        progress = job.run(documents, batches, on_progress, sources)
        return _build_result(journal.commit(progress), started, progress, resumed)


def unigram_entropy(counts: NDArray[np.int64] | NDArray[np.float64]) -> float:
    """Entropy in nats of the distribution of these counts or weights."""
    share = counts[counts > 0] / counts.sum()
    return max(0.0, float(-(share * np.log(share)).sum()))


class _BuildJob:
    """One build, from its recorded progress to its last shard."""

    def __init__(
        self,
        journal: BuildJournal,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        shard_tokens: int,
        base: TokenShards | None,
        progress: BuildProgress,
    ) -> None:
        self._journal, self._tokenizer, self._base, self._progress = journal, tokenizer, base, progress
        self._template = template
        self._next_record_time = 0.0
        counts = journal.read_counts(progress) if progress.shards else self._initial_counts()
        assert counts is not None
        first = len(base.index.shards) if base else 0
        marked = template is not None
        self._dtype = word_dtype(tokenizer.vocabulary, marked)
        self._writer = ShardWriter(journal.folder, self._dtype, shard_tokens, counts, first, progress.shards, marked)

    def run(
        self,
        documents: DocumentStream,
        batches: Iterator[TokenizedBatch],
        on_progress: OnProgress,
        sources: Sequence[str],
    ) -> BuildProgress:
        """Write all remaining shards; returns the progress to commit."""
        try:
            skip = self._progress.skip
            for batch in batches:
                self._write(batch, skip)
                on_progress(documents.bytes_done, documents.total_bytes)
                skip = 0
            self._writer.finish()
        except BaseException:
            self._writer.abort()
            self._journal.remove_stale_files(self._progress if self._progress.shards else None)
            raise
        if not self._writer.shards:
            self._journal.remove_stale_files(None)
            raise SpecError([_no_documents_problem(sources, documents)])
        skipped = {"left_out": dict(documents.skipped.counts), "examples": documents.skipped.examples}
        return self._record_progress(skipped | {"stage": "placing" if self._base else "clearing"}, sources)

    def _write(self, batch: TokenizedBatch, skip: int) -> None:
        """Write a batch, without the first `skip` tokens of its first document."""
        starts = [0, *batch.ends[:-1].tolist()]

        def closed(done: int) -> None:
            if time.monotonic() < self._next_record_time:
                return
            # The last document that begins before the shard's end; if it also ends there, all its tokens are skipped.
            number = bisect_left(starts, done + skip) - 1
            at = batch.locations[number]
            position = {"file": at.file, "line": at.line, "skip": done + skip - starts[number]}
            self._record_progress(position | {"left_out": dict(at.skipped or {}), "examples": at.examples})

        self._writer.write(batch.tokens[skip:], batch.ends - skip, closed)

    def _record_progress(self, changes: Mapping[str, object], sources: Sequence[str] | None = None) -> BuildProgress:
        """Record the progress; with `sources`, that the build is complete."""
        began = time.monotonic()
        self._writer.sync()
        shards = tuple(self._writer.shards)
        counts = self._journal.write_counts(shards, self._writer.counts)
        index = None if sources is None else self._index(sources, counts)
        done = {"shards": shards, "counts": counts, "index": index}
        self._progress = self._progress.model_copy(update=dict(changes) | done)
        self._journal.write(self._progress)
        ended = time.monotonic()
        self._next_record_time = ended + _PROGRESS_OVERHEAD_DIVISOR * (ended - began)
        return self._progress

    def _index(self, sources: Sequence[str], counts_hash: str) -> DatasetIndex:
        tokenizer, counts, base = self._tokenizer, self._writer.counts, self._base.index if self._base else None
        shards = (*(base.shards if base else ()), *self._writer.shards)
        version = DatasetVersion(
            shards=len(shards),
            tokens=int(counts.sum()),
            documents=(base.documents if base else 0) + sum(shard.documents for shard in self._writer.shards),
            unigram_loss=unigram_entropy(counts),
            counts=counts_hash,
        )
        return DatasetIndex(
            format=1 if self._template is None else 2,
            tokenizer=tokenizer.name,
            vocabulary=tokenizer.vocabulary,
            end_of_text=tokenizer.end_of_text,
            dtype=self._dtype,
            chat_template=None if self._template is None else self._template.fingerprint,
            tokens=version.tokens,
            documents=version.documents,
            unigram_loss=version.unigram_loss,
            sources=(*(base.sources if base else ()), *(source_label(source) for source in sources)),
            shards=shards,
            editions=(*(base.all_versions if base else ()), version),
        )

    def _initial_counts(self) -> NDArray[np.int64]:
        if self._base is None:
            return np.zeros(self._tokenizer.vocabulary, dtype=np.int64)
        return self._base.token_counts(self._base.newest_version)


def _request_hash(documents: DocumentStream, tokenizer: Tokenizer, shard_tokens: int, append: bool) -> str:
    """A hash of what decides the bytes. `skip_bad` does not: a line that was kept was not bad."""
    form = documents.form
    request: tuple[object, ...] = (documents.sources_hash, tokenizer.name, tokenizer.end_of_text, form.field)
    request += (shard_tokens, append)
    if form.template is not None:
        request += (form.template.fingerprint,)
    return hashlib.sha256(repr(request).encode()).hexdigest()


def _resumable_progress(
    journal: BuildJournal, progress: BuildProgress | None, request: str, base: TokenShards | None, on_note: OnMessage
) -> BuildProgress:
    """The progress to resume from; that of another build is reported and discarded."""
    fingerprint = base.index.fingerprint(base.newest_version) if base else ""
    fresh = BuildProgress(
        request=request, base=fingerprint, stage="writing", shards=(), counts="", file=0, line=0, skip=0,
        left_out={}, examples=(),
    )  # fmt: skip
    why = ""
    if progress is not None and (progress.request, progress.base) != (request, fingerprint):
        why = "it had other sources or settings, or a source has changed since"
    elif progress is not None and progress.shards and journal.read_counts(progress) is None:
        why = "its token counts are gone"
    if progress is not None and why:
        on_note(f"discarding {len(progress.shards)} shards of an interrupted build: {why}")
        progress = None
    journal.remove_stale_files(progress)
    return progress or fresh


def _build_result(index: DatasetIndex, started: float, progress: BuildProgress, resumed: int) -> BuildResult:
    return BuildResult(index, time.monotonic() - started, progress.left_out, progress.examples, resumed)


def _check_output_outside_sources(sources: Sequence[str], folder: Path) -> None:
    inside = [
        source
        for source in sources
        if source != PYTHON_STDLIB and folder.resolve().is_relative_to(Path(source).resolve())
    ]
    if inside:
        message = f"is inside its own source {inside[0]}, so the next build would read the shards as text"
        raise SpecError([problem_at(folder, 1, "output", message, "choose a folder outside it")])


def _no_documents_problem(sources: Sequence[str], documents: DocumentStream) -> Problem:
    skipped = ", ".join(f"{count} {reason}" for reason, count in sorted(documents.skipped.counts.items())) or "none"
    return problem_at(Path(" ".join(sources)), 1, "source", f"holds no document (skipped: {skipped})")


@contextmanager
def _build_lock(folder: Path) -> Iterator[None]:
    """Exclusive lock on the folder, released when the process exits, so that a killed build leaves none."""
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
            suggestion = "build on a file system that supports locks, and copy the folder"
            raise SpecError([problem_at(folder, 1, "output", message, suggestion)]) from None
        yield


def _check_overwrite_allowed(folder: Path, force: bool) -> None:
    if (folder / INDEX_FILE).exists() and not force:
        message = "already holds a data set"
        hint = "choose another folder, --force to replace it, or `danlu data append` to add to it"
        raise SpecError([problem_at(folder, 1, "output", message, hint)])


def _check_same_tokenizer(base: TokenShards, tokenizer: Tokenizer) -> None:
    index = base.index
    if (index.tokenizer, index.end_of_text) != (tokenizer.name, tokenizer.end_of_text):
        message = f'was built with tokenizer "{index.tokenizer}", but "{tokenizer.name}" was given to append'
        hint = "give --tokenizer and --end-of-text as they were, or build another data set and mix the two by weight"
        raise SpecError([dataset_problem(base.location, INDEX_FILE, "tokenizer", message, hint)])


def _check_same_template(base: TokenShards, template: ChatTemplate | None) -> None:
    was, now = base.index.chat_template, None if template is None else template.fingerprint
    if was != now:
        kinds = {True: "text", False: "conversations"}
        message = f"holds {kinds[was is None]}, but {kinds[now is None]} were given to append"
        if was is not None and now is not None:
            message = "was built with another chat template than that beside the tokenizer"
        hint = "build another data set, and mix the two by weight"
        raise SpecError([dataset_problem(base.location, INDEX_FILE, "chat_template", message, hint)])
