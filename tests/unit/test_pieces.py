"""Sources cut into pieces, read apart and joined again, are what one process reads: tokens, places, what is told."""

import gzip
import json
import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from danlu.spec import SpecError
from danlu.storage.data import input_splits
from danlu.storage.data.build import build_dataset
from danlu.storage.data.document_reader import DocumentFormat
from danlu.storage.data.documents import DocumentPosition, DocumentStream
from danlu.storage.data.input_splits import FileSplit, SplitMerger, make_splits, tokenize_split
from danlu.storage.data.tokenization import TokenizedBatch, local_tokenize_fn
from danlu.storage.data.tokenizer import BytesTokenizer

BYTES = BytesTokenizer()
SIZES = (1, 37, 200, 1000, 1 << 20)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All kinds of files, with blank, empty, bad and long lines, with and without an end of line at the end."""
    root = tmp_path_factory.mktemp("pieces") / "corpus"
    root.mkdir()
    dice = random.Random(3)

    def lines(count: int) -> str:
        kinds = ['{"text": 7}', "", '{"text": ""}', "no JSON"]
        made = [json.dumps({"text": "".join(dice.choices("abé", k=dice.randint(1, 60)))}) for _ in range(count)]
        for kind in kinds:
            made.insert(dice.randrange(count), kind)
        return "\n".join(made)

    (root / "a.jsonl").write_text(lines(30) + "\n")
    (root / "b.jsonl.gz").write_bytes(gzip.compress(lines(9).encode(), mtime=0))
    (root / "c.txt").write_text("one document of a file " * 12)
    (root / "d.jsonl").write_text(lines(12) + "\n" + json.dumps({"text": "long " * 300}))
    (root / "e.txt").write_bytes(b"caf\xe9")
    (root / "f.jsonl").write_text("")
    (root / "g.jsonl").write_text("\n\n" + json.dumps({"text": "last"}))
    return root


def documents(corpus: Path, place: DocumentPosition | None = None, skip_bad: bool = True) -> DocumentStream:
    return DocumentStream([str(corpus)], skip_bad=skip_bad, position=place)


def in_pieces(read: DocumentStream, size: int) -> Iterator[TokenizedBatch]:
    """As a cluster does it: pieces and rows as they would travel."""
    joined = SplitMerger(read, BYTES)
    for piece in make_splits(read, size):
        travelled = [FileSplit(*stretch) for stretch in json.loads(json.dumps(piece))]
        for row in tokenize_split(travelled, read.form, BYTES):
            yield from joined.merge(row)
    read.bytes_done = read.total_bytes


def whole(groups: Iterator[TokenizedBatch]) -> tuple[list[DocumentPosition], list[int], list[int]]:
    """All groups in one, however they were cut."""
    places: list[DocumentPosition] = []
    tokens: list[int] = []
    lengths: list[int] = []
    for group in groups:
        places += group.locations
        tokens += group.tokens.tolist()
        lengths += np.diff(group.ends, prepend=0).tolist()
    return places, tokens, lengths


@pytest.mark.parametrize("size", SIZES)
def test_pieces_of_any_size_are_the_whole(corpus: Path, size: int) -> None:
    here, apart = documents(corpus), documents(corpus)
    assert whole(in_pieces(apart, size)) == whole(local_tokenize_fn(BYTES)(here))
    assert apart.skipped.counts == here.skipped.counts and apart.skipped.examples == here.skipped.examples
    assert apart.skipped.counts["not UTF-8"] == 1 and len(apart.skipped.examples) == 5


@pytest.mark.parametrize("size", [37, 1000])
def test_going_on_from_any_document(corpus: Path, size: int) -> None:
    places, _, _ = whole(local_tokenize_fn(BYTES)(documents(corpus)))
    for place in places:
        here, apart = documents(corpus, place), documents(corpus, place)
        assert whole(in_pieces(apart, size)) == whole(local_tokenize_fn(BYTES)(here))
        assert apart.skipped.counts == here.skipped.counts


@pytest.mark.parametrize("size", SIZES)
def test_what_is_bad_is_told_in_the_same_words(corpus: Path, tmp_path: Path, size: int) -> None:
    with pytest.raises(SpecError) as here:
        build_dataset([str(corpus)], tmp_path / "here", BYTES)
    with pytest.raises(SpecError) as apart:
        build_dataset([str(corpus)], tmp_path / "apart", BYTES, encode=lambda read: in_pieces(read, size))
    assert str(apart.value) == str(here.value)


def test_a_file_that_cannot_be_read_is_counted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "corpus"
    root.mkdir()
    (root / "a.jsonl").write_text("\n".join(json.dumps({"text": f"text {number}"}) for number in range(40)))
    (root / "b.jsonl").write_text(json.dumps({"text": "last"}))
    opened = Path.open

    def refusing(path: Path, *arguments: object, **named: object) -> object:
        if path.name == "a.jsonl":
            raise PermissionError(13, "Permission denied")
        return opened(path, *arguments, **named)  # type: ignore[call-overload]

    monkeypatch.setattr(Path, "open", refusing)
    here, apart = documents(root), documents(root)
    assert whole(in_pieces(apart, 100)) == whole(local_tokenize_fn(BYTES)(here))
    assert apart.skipped.counts == here.skipped.counts == {"unreadable": 1}
    assert apart.skipped.examples == here.skipped.examples


def test_a_machine_that_sees_another_file_or_has_another_release_is_named(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tmp_path / "a.jsonl"
    own.write_text('{"text": "first"}\n')
    read = DocumentStream([str(own)])
    (piece,) = make_splits(read)
    own.write_text('{"text": "another"}\n')
    with pytest.raises(SpecError, match=r"a\.jsonl:1: file: is another file on .*\n.*that all nodes"):
        list(SplitMerger(read, BYTES).merge(next(tokenize_split(piece, DocumentFormat(), BYTES))))
    own.unlink()
    with pytest.raises(SpecError, match="cannot be seen on"):
        list(SplitMerger(read, BYTES).merge(next(tokenize_split(piece, DocumentFormat(), BYTES))))
    row = next(tokenize_split(next(make_splits(documents(corpus))), DocumentFormat(), BYTES)) | {"machine": "node-7"}
    monkeypatch.setattr(input_splits, "package_versions", lambda: "danlu 99, tokenizers 1")
    with pytest.raises(SpecError, match=r"node-7:1: ray: has danlu .* but this machine danlu 99"):
        list(SplitMerger(documents(corpus), BYTES).merge(row))
