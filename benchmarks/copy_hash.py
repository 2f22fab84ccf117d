"""Time of a copy that computes a checksum, compared with a plain copy of the same bytes in the same second.

    python benchmarks/copy_hash.py [--mebibytes 256] [--rounds 15] [--processes 1 2] [--quick]

Each round copies once each way, in alternating order, so that other load on the machine affects both. The figure is the
median of the rounds' ratios; with several processes, all copy at the same time and the worst one's median counts. The
last line is JSON.
"""

import argparse
import json
import multiprocessing as mp
import statistics
import time
from multiprocessing.synchronize import Barrier

import numpy as np

from danlu.storage.store.checksum import copy_with_crc32c, crc32c

TARGET = 1.05


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--mebibytes", type=int, default=256)
    options.add_argument("--rounds", type=int, default=15)
    options.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    options.add_argument("--quick", action="store_true", help="few rounds of less memory: does it run?")
    chosen = options.parse_args()
    size, rounds = (32 << 20, 3) if chosen.quick else (chosen.mebibytes << 20, chosen.rounds)
    results = {str(count): measure(count, size, rounds) for count in chosen.processes}
    for count, result in results.items():
        rates = f"plain {result['plain_gbs']:.2f} GB/s, with checksum {result['hashed_gbs']:.2f} GB/s"
        ratio = f"ratio of times {result['ratio']:.3f} (target {TARGET} at most)"
        print(f"{count} process(es): {rates}, {ratio}; checksum alone {result['crc_gbs']:.2f} GB/s")
    print(json.dumps({"bytes": size, "rounds": rounds, "processes": results}))


def measure(count: int, size: int, rounds: int) -> dict[str, float]:
    context = mp.get_context("spawn")
    barrier = context.Barrier(count)
    with context.Manager() as manager:
        answers = manager.list()
        ranks = [context.Process(target=one, args=(barrier, answers, size, rounds)) for _ in range(count)]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join()
        if any(rank.exitcode for rank in ranks):
            raise SystemExit("a copying process failed")
        return max(answers, key=lambda answer: answer["ratio"])


def one(barrier: Barrier, answers: "list[dict[str, float]]", size: int, rounds: int) -> None:
    source = np.random.default_rng(0).integers(0, 256, size, dtype=np.uint8)
    target = np.ones(size, dtype=np.uint8)  # touched, so that no page fault falls into the timed part
    view, into = memoryview(source), memoryview(target)
    expected = crc32c(view)

    def plain() -> float:
        began = time.perf_counter()
        np.copyto(target, source)
        return time.perf_counter() - began

    def hashed() -> float:
        began = time.perf_counter()
        found = copy_with_crc32c(view, into)
        took = time.perf_counter() - began
        assert found == expected
        return took

    def alone() -> float:
        began = time.perf_counter()
        crc32c(view)
        return time.perf_counter() - began

    plain(), hashed()
    pairs = []
    for number in range(rounds):
        barrier.wait(120)
        pairs.append((plain(), hashed()) if number % 2 else (hashed(), plain())[::-1])
    assert np.array_equal(source, target)
    answers.append(
        {
            "ratio": statistics.median(second / first for first, second in pairs),
            "plain_gbs": size / statistics.median(first for first, _ in pairs) / 1e9,
            "hashed_gbs": size / statistics.median(second for _, second in pairs) / 1e9,
            "crc_gbs": size / statistics.median(alone() for _ in range(3)) / 1e9,
        }
    )


if __name__ == "__main__":
    main()
