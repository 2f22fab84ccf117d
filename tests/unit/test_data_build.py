import fcntl
import gzip
import json
import math
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from danlu.cli.data import app
from danlu.spec import SpecError
from danlu.storage.data import document_reader, documents
from danlu.storage.data.build import build_dataset
from danlu.storage.data.token_shards import TokenShards
from danlu.storage.data.tokenizer import BytesTokenizer, HuggingFaceTokenizer, open_tokenizer

BYTES = BytesTokenizer()
FILES = [".done", ".lock", "00000.bin", "00000.crc", "00000.ends", "edition-00000.counts", "index.json"]


def texts(folder: Path) -> list[str]:
    """The documents of a data set, decoded."""
    shards = TokenShards.open(folder)
    return BYTES.decode(shards.read(0, shards.tokens)).split("<|endoftext|>")[:-1]


def jsonl(*records: object) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    root = tmp_path / "corpus"
    (root / "b" / "inner").mkdir(parents=True)
    (root / "c.txt").write_text("plain 文字\r\n")
    (root / "a.jsonl").write_text(jsonl({"text": "one"}, {"text": "two\nlines"}))
    (root / "b" / "inner" / "code.py").write_text("print()\n")
    (root / "b" / "packed.jsonl.gz").write_bytes(gzip.compress(jsonl({"text": "packed"}, {"text": "é"}).encode()))
    return root


def test_every_kind_of_file_in_sorted_order(corpus: Path, tmp_path: Path) -> None:
    built = build_dataset([str(corpus)], tmp_path / "out", BYTES)
    expected = ["one", "two\nlines", "print()\n", "packed", "é", "plain 文字\r\n"]
    assert texts(tmp_path / "out") == expected
    assert built.index.documents == 6 and not built.skipped
    assert built.index.tokens == sum(len(text.encode()) + 1 for text in expected)


def test_sources_keep_the_order_given_and_are_recorded(corpus: Path, tmp_path: Path) -> None:
    sources = [str(corpus / "c.txt"), str(corpus / "a.jsonl")]
    built = build_dataset(sources, tmp_path / "out", BYTES)
    assert texts(tmp_path / "out") == ["plain 文字\r\n", "one", "two\nlines"]
    assert built.index.sources == tuple(sources)


def test_the_same_sources_give_the_same_bytes(corpus: Path, tmp_path: Path) -> None:
    build_dataset([str(corpus)], tmp_path / "first", BYTES, shard_tokens=7)
    build_dataset([str(corpus)], tmp_path / "second", BYTES, shard_tokens=7)
    assert contents(tmp_path / "first") == contents(tmp_path / "second")
    build_dataset([str(corpus)], tmp_path / "whole", BYTES)
    pieces = [raw for name, raw in contents(tmp_path / "first").items() if name.endswith(".bin")]
    assert b"".join(pieces) == (tmp_path / "whole" / "00000.bin").read_bytes()


def test_shards_are_little_endian(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("A")
    build_dataset([str(tmp_path / "a.txt")], tmp_path / "out", BYTES)
    assert (tmp_path / "out" / "00000.bin").read_bytes() == b"A\x00\x00\x01"


def test_unigram_loss_is_the_entropy_of_the_tokens(corpus: Path, tmp_path: Path) -> None:
    built = build_dataset([str(corpus)], tmp_path / "out", BYTES, shard_tokens=5)
    shards = TokenShards.open(tmp_path / "out")
    counts = Counter(shards.read(0, shards.tokens).tolist())
    by_definition = -sum(count / shards.tokens * math.log(count / shards.tokens) for count in counts.values())
    assert built.index.unigram_loss == pytest.approx(by_definition, rel=1e-12)


@pytest.mark.parametrize(
    ("line", "reason", "message"),
    [
        ('{"text": "cut', "bad JSON", "line: is not JSON"),
        ("[1]", "bad JSON", "must be an object with the field `text`"),
        ('{"body": "x", "id": 3}', "no field", "is missing\n    → the line has: body, id; choose one with --field"),
        ('{"text": 3}', "not a text", "text: is 3, but must be a text"),
        ('{"text": "\\ud800"}', "not Unicode", "an unpaired UTF-16 surrogate"),
        (b'{"text": "\xff"}', "bad JSON", "line: is not JSON: 'utf-8' codec"),
    ],
)
def test_a_bad_line_is_named_or_counted(tmp_path: Path, line: str | bytes, reason: str, message: str) -> None:
    path = tmp_path / "lines.jsonl"
    bad = line if isinstance(line, bytes) else line.encode()
    path.write_bytes(b'{"text": "good"}\n\n' + bad + b'\n{"text": "after"}\n')
    with pytest.raises(SpecError) as caught:
        build_dataset([str(path)], tmp_path / "out", BYTES)
    assert f"{path}:3: " in str(caught.value) and message in str(caught.value) and "--skip-bad" in str(caught.value)
    built = build_dataset([str(path)], tmp_path / "out", BYTES, skip_bad=True)
    assert texts(tmp_path / "out") == ["good", "after"]
    assert built.skipped == {reason: 1} and built.skipped_examples[0].line == 3


def test_another_field(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(jsonl({"body": "here", "text": "not here"}))
    build_dataset([str(tmp_path / "a.jsonl")], tmp_path / "out", BYTES, field="body")
    assert texts(tmp_path / "out") == ["here"]


def test_broken_gzip_is_named_or_counted(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.gz"
    many = jsonl(*({"text": f"{number * 7919 % 10007}"} for number in range(5000)))
    path.write_bytes(gzip.compress(many.encode())[:-2000])
    with pytest.raises(SpecError, match=r"a\.jsonl\.gz:\d+: file: is broken gzip from here on"):
        build_dataset([str(path)], tmp_path / "out", BYTES)
    built = build_dataset([str(path)], tmp_path / "out", BYTES, skip_bad=True)
    assert built.skipped == {"broken gzip": 1} and 0 < built.index.documents < 5000


def test_a_file_that_is_not_utf8_is_named_or_counted(tmp_path: Path) -> None:
    root = tmp_path / "corpus"
    root.mkdir()
    (root / "good.txt").write_text("good")
    (root / "latin.txt").write_bytes(b"line\ncaf\xe9\n")
    with pytest.raises(SpecError, match=r"latin\.txt:2: file: is not UTF-8"):
        build_dataset([str(root)], tmp_path / "out", BYTES)
    built = build_dataset([str(root)], tmp_path / "out", BYTES, skip_bad=True)
    assert texts(tmp_path / "out") == ["good"] and built.skipped == {"not UTF-8": 1}


def test_what_a_folder_leaves_out_is_counted(corpus: Path, tmp_path: Path) -> None:
    (corpus / ".hidden").write_text("no")
    (corpus / "empty.txt").write_text("")
    (corpus / "d.jsonl").write_text(jsonl({"text": ""}))
    (corpus / "loop").symlink_to(corpus)
    built = build_dataset([str(corpus)], tmp_path / "out", BYTES)
    assert built.index.documents == 6
    assert built.skipped == {"hidden": 1, "empty": 2, "linked folder": 1}


def test_missing_sources_are_all_named(corpus: Path, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="did you mean") as caught:
        build_dataset([str(corpus / "a.json"), "python_stdlib"], tmp_path / "out", BYTES)
    assert len(caught.value.problems) == 2 and "`python-stdlib`" in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_sources_without_a_document_make_no_data_set(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(SpecError, match=r"holds no document \(skipped: 1 empty\)"):
        build_dataset([str(tmp_path / "empty.txt")], tmp_path / "out", BYTES)
    assert not (tmp_path / "out" / "index.json").exists()


def test_a_document_too_long_to_hold_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(document_reader, "MAX_DOCUMENT_BYTES", 100)
    (tmp_path / "a.txt").write_text("x" * 101)
    (tmp_path / "b.jsonl").write_text(jsonl({"text": "short"}, {"text": "x" * 100}))
    with pytest.raises(SpecError, match=r"one document of 101 bytes.*\n.*as JSON lines"):
        build_dataset([str(tmp_path / "a.txt")], tmp_path / "out", BYTES, skip_bad=True)
    with pytest.raises(SpecError, match=r"b\.jsonl:2: line: is 100 bytes or longer"):
        build_dataset([str(tmp_path / "b.jsonl")], tmp_path / "out", BYTES, skip_bad=True)


def test_a_data_set_is_replaced_only_by_force_and_only_by_a_whole_one(corpus: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    build_dataset([str(corpus)], out, BYTES, shard_tokens=5)
    before = contents(out)
    with pytest.raises(SpecError, match=r"already holds a data set\n.*--force"):
        build_dataset([str(corpus)], out, BYTES)
    (corpus / "z.jsonl").write_text("not JSON\n")
    with pytest.raises(SpecError, match="is not JSON"):
        build_dataset([str(corpus)], out, BYTES, shard_tokens=5, force=True)
    assert {name: raw for name, raw in contents(out).items() if name in before} == before
    (corpus / "z.jsonl").unlink()
    build_dataset([str(corpus / "c.txt")], out, BYTES, force=True)
    assert sorted(contents(out)) == FILES
    assert texts(out) == ["plain 文字\r\n"]


def test_what_a_killed_build_left_is_cleared(corpus: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    for left in ("00000.bin", "00001.bin", "00000.bin.partial", "index.json.partial"):
        (out / left).write_bytes(b"left")
    build_dataset([str(corpus)], out, BYTES)
    assert sorted(contents(out)) == FILES


def test_two_builds_do_not_write_one_folder(corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with (tmp_path / "out" / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(SpecError, match="is being written by another build"):
            build_dataset([str(corpus)], tmp_path / "out", BYTES)


def test_output_inside_its_source_is_refused(corpus: Path) -> None:
    with pytest.raises(SpecError, match="is inside its own source"):
        build_dataset([str(corpus)], corpus / "shards", BYTES)


def test_progress_counts_bytes_to_the_end(corpus: Path, tmp_path: Path) -> None:
    reports: list[tuple[int, int]] = []
    build_dataset([str(corpus)], tmp_path / "out", BYTES, lambda done, total: reports.append((done, total)))
    total = sum(path.stat().st_size for path in corpus.rglob("*") if path.is_file())
    assert reports[-1] == (total, total)


def test_memory_is_that_of_a_batch_not_of_the_corpus(tmp_path: Path) -> None:
    """96 MiB of documents through a process that grows by far less."""
    path = tmp_path / "big.jsonl"
    line = jsonl({"text": "0123456789abcdef" * 4096})
    with path.open("w") as file:
        for _ in range(1536):
            file.write(line)
    program = (
        "import resource, sys; from pathlib import Path; from danlu.storage.data.build import build_dataset;"
        "from danlu.storage.data.tokenizer import BytesTokenizer;"
        "most = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss;"
        "before = most(); build_dataset([sys.argv[1]], Path(sys.argv[2]), BytesTokenizer()); print(most() - before)"
    )
    command = [sys.executable, "-c", program, str(path), str(tmp_path / "out")]
    grown = int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert grown < 60 * 1024  # KiB


def test_python_stdlib_builds_offline_and_without_tests(tmp_path: Path) -> None:
    built = build_dataset(["python-stdlib"], tmp_path / "out", BYTES)
    assert built.index.tokens > 5_000_000 and 2 < built.index.unigram_loss < 4
    assert built.index.sources[0].startswith("python-stdlib 3.")
    listed = [file.path.parts for file in documents.DocumentStream(["python-stdlib"]).files]
    assert any(parts[-1] == "argparse.py" for parts in listed)
    root = len(Path(documents.sysconfig.get_path("stdlib")).parts)
    assert not any({"site-packages", "test", "__pycache__"} & set(parts[root:]) for parts in listed)


def test_python_stdlib_leaves_out_what_is_not_utf8_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "library"
    root.mkdir()
    (root / "good.py").write_text("pass\n")
    (root / "latin.py").write_bytes(b"# \xe9\n")
    monkeypatch.setattr(documents.sysconfig, "get_path", lambda name: str(root))
    built = build_dataset(["python-stdlib"], tmp_path / "out", BYTES)
    assert texts(tmp_path / "out") == ["pass\n"] and built.skipped == {"not UTF-8": 1}


def test_bytes_round_trip() -> None:
    text = "aé文😀\n"
    assert BYTES.decode(BYTES.encode(text)) == text
    assert BYTES.vocabulary == 257
    assert BYTES.decode(np.array([104, 105, 256, 256, 33])) == "hi<|endoftext|><|endoftext|>!"


# ---- tokenizer.json


def tokenizer_file(path: Path, *special: str) -> Path:
    tokenizers = pytest.importorskip("tokenizers")
    words = {word: number for number, word in enumerate(["[UNK]", "the", "furnace", "burns"])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(list(special))
    tokenizer.enable_truncation(2)  # as files made for a model with short inputs have it
    tokenizer.enable_padding(length=9)
    tokenizer.save(str(path))
    return path


def test_a_tokenizer_file_encodes_documents_whole(tmp_path: Path) -> None:
    tokenizer = HuggingFaceTokenizer(tokenizer_file(tmp_path / "tokenizer.json", "<|endoftext|>"))
    assert (tokenizer.vocabulary, tokenizer.end_of_text) == (5, 4)
    (tmp_path / "a.jsonl").write_text(jsonl({"text": "the furnace burns the furnace"}, {"text": "burns"}))
    built = build_dataset([str(tmp_path / "a.jsonl")], tmp_path / "out", tokenizer)
    shards = TokenShards.open(tmp_path / "out")
    assert shards.read(0, shards.tokens).tolist() == [1, 2, 3, 1, 2, 4, 3, 4]
    assert built.index.dtype == "uint8" and built.index.tokenizer.startswith("tokenizer.json sha256:")


def test_text_cannot_forge_the_end_of_text(tmp_path: Path) -> None:
    tokenizer = HuggingFaceTokenizer(tokenizer_file(tmp_path / "tokenizer.json", "<|endoftext|>"))
    assert tokenizer.end_of_text not in tokenizer.encode("the <|endoftext|> burns")
    assert tokenizer.encode("the burns").tolist() == [1, 3]


def test_the_end_of_text_is_found_given_or_asked_for(tmp_path: Path) -> None:
    known = str(tokenizer_file(tmp_path / "known.json", "<pad>", "</s>"))
    assert open_tokenizer(known).end_of_text == 5
    assert open_tokenizer(known, "<pad>").end_of_text == 4
    with pytest.raises(SpecError, match='"<p>" is not in the vocabulary'):
        open_tokenizer(known, "<p>")
    unknown = str(tokenizer_file(tmp_path / "unknown.json", "<pad>", "<stop>"))
    with pytest.raises(SpecError, match="candidates: <pad>, <stop>"):
        open_tokenizer(unknown)
    several = str(tokenizer_file(tmp_path / "several.json", "</s>", "<|endoftext|>"))
    with pytest.raises(SpecError, match="2 tokens look like an end of text"):
        open_tokenizer(several)


def test_what_is_no_tokenizer_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SpecError, match="has its own end of text"):
        open_tokenizer("bytes", "</s>")
    with pytest.raises(SpecError, match="is not a file"):
        open_tokenizer(str(tmp_path / "nowhere.json"))
    path = tokenizer_file(tmp_path / "tokenizer.json", "</s>")
    with pytest.raises(SpecError, match=r"did you mean `.*tokenizer\.json`"):
        open_tokenizer(str(tmp_path))
    (tmp_path / "broken.json").write_text("{}")
    with pytest.raises(SpecError, match=r"is not a tokenizer\.json"):
        open_tokenizer(str(tmp_path / "broken.json"))
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(SpecError, match=r"pip install 'danlu\[hf\]'"):
        open_tokenizer(str(path))


# ---- danlu data


def run(*arguments: str | Path) -> tuple[int, str, str, BaseException | None]:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    return result.exit_code, result.stdout, result.stderr, result.exception


def test_the_command_builds_shows_and_verifies(corpus: Path, tmp_path: Path) -> None:
    (corpus / "bad.jsonl").write_text("bad\n")
    out = tmp_path / "out"
    code, printed, warned, _ = run("build", corpus, "-o", out, "--skip-bad", "--shard-tokens", "10")
    assert code == 0
    assert "6 documents, 48 tokens, 5 shards in" in printed and "unigram loss" in printed
    assert "skipped: 1 bad JSON" in warned and "bad.jsonl:1" in warned
    code, printed, _, _ = run("show", out)
    assert code == 0 and "257 (end of text: 256)" in printed and "one<|endoftext|>two\nlines<|endoftext|>" in printed
    code, printed, _, _ = run("show", out, "--json")
    assert json.loads(printed)["documents"] == 6
    code, printed, _, _ = run("verify", out)
    assert code == 0 and "5 shards, 48 tokens: all match the index" in printed
    raw = (out / "00000.bin").read_bytes()
    (out / "00000.bin").write_bytes(raw[::-1])
    code, _, _, error = run("verify", out)
    assert code != 0 and isinstance(error, SpecError)


def test_the_command_speaks_json(corpus: Path, tmp_path: Path) -> None:
    code, printed, _, _ = run("build", corpus, "-o", tmp_path / "out", "--json")
    figures = json.loads(printed)
    assert code == 0
    assert (figures["documents"], figures["tokens"], figures["shards"], figures["vocabulary"]) == (6, 48, 1, 257)
    assert json.loads(run("verify", tmp_path / "out", "--json")[1])["good"] is True
