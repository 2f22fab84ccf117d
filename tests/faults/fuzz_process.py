"""The process that `benchmarks/ckpt_fuzz.py` watches: python fuzz_process.py WORK ENGINE INPUTS SEED [CORPUS]."""

import json
import random
import sys
from dataclasses import asdict
from pathlib import Path

MEMORY = 512 << 20
EVERY = 500
"""Inputs between two reports."""


class FromBytes(random.Random):
    """Choices that follow the bytes a fuzzer gives, so that it can learn which of them lead further."""

    def __init__(self, data: bytes) -> None:
        super().__init__(0)
        self._data, self._at = data, 0

    def getrandbits(self, count: int, /) -> int:
        size = -(-count // 8)
        piece = self._data[self._at : self._at + size]
        self._at += size
        return int.from_bytes(piece.ljust(size, b"\0"), "little") >> (8 * size - count)

    def random(self) -> float:
        return self.getrandbits(32) / 2**32


def main(work: Path, engine: str, inputs: int, seed: int, *corpus: str) -> None:
    if engine == "atheris":
        import atheris

        with atheris.instrument_imports(include=["danlu.storage.checkpoint", "danlu.storage.store.safe_path"]):
            import fuzzing
    else:
        import fuzzing
    targets = [fuzzing.Target(writers) for writers in (1, 2, 66)]
    told = fuzzing.Fuzzed()

    def try_one(draw: random.Random) -> None:
        target = draw.choices(targets, (20, 20, 1))[0]
        target.try_one(fuzzing.mutated(target.files, draw), told)
        told.outside = sum(len(each.calls.outside) for each in targets)
        if told.inputs % EVERY == 0 or told.inputs == inputs:
            (work / "new").write_text(json.dumps(asdict(told)), encoding="utf-8")
            (work / "new").rename(work / "told")

    if engine == "random":
        fuzzing.memory_limit(MEMORY)
        draw = random.Random(seed)
        while told.inputs < inputs:
            try_one(draw)
        return
    limits = [f"-artifact_prefix={work}/", "-report_slow_units=60"]
    limits += [
        f"-runs={inputs + 10}",
        f"-seed={seed}",
        "-max_len=256",
        "-len_control=0",
        f"-rss_limit_mb={MEMORY >> 20}",
    ]
    for folder in corpus:
        Path(folder).mkdir(parents=True, exist_ok=True)
    atheris.Setup([sys.argv[0], *limits, *corpus], lambda data: try_one(FromBytes(data)))
    atheris.Fuzz()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), *sys.argv[5:])
