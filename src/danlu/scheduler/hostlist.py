"""Expand Slurm's host lists, such as `n[0-3,7],x01`, without starting a process."""

import re
from itertools import product

_BRACKETS = re.compile(r"\[([^\[\]]*)\]")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")


def expand_hostlist(hostlist: str) -> tuple[str, ...]:
    """Every host of a bracketed list, in its own order: `n[08-10],x` is n08, n09, n10, x.

    Raises `ValueError` for text that Slurm itself would not write.
    """
    if hostlist in ("", "(null)"):
        return ()
    return tuple(host for pattern in _split(hostlist) for host in _expand_part(pattern))


def _split(hostlist: str) -> list[str]:
    """Split at the commas that are outside brackets."""
    patterns, depth, start = [], 0, 0
    for index, character in enumerate(hostlist):
        depth += (character == "[") - (character == "]")
        if depth not in (0, 1):
            raise ValueError(f'host list "{hostlist}" has brackets that do not match')
        if character == "," and depth == 0:
            patterns.append(hostlist[start:index])
            start = index + 1
    patterns.append(hostlist[start:])
    if depth or not all(patterns):
        raise ValueError(f'host list "{hostlist}" has brackets that do not match or an empty name')
    return patterns


def _expand_part(pattern: str) -> list[str]:
    """One name with its brackets expanded, the last bracket varying fastest."""
    pieces = _BRACKETS.split(pattern)  # text, ranges, text, ranges, …, text
    choices = [_expand_range(piece, pattern) if index % 2 else [piece] for index, piece in enumerate(pieces)]
    return ["".join(choice) for choice in product(*choices)]


def _expand_range(ranges: str, pattern: str) -> list[str]:
    """The numbers of one bracket; leading zeros are kept."""
    numbers = []
    for item in ranges.split(","):
        match = _RANGE.fullmatch(item)
        first, last = (match[1], match[2] or match[1]) if match else ("1", "0")
        if int(last) < int(first):
            raise ValueError(f'host list "{pattern}" has "{item}" where a number or a rising range was expected')
        numbers += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    return numbers
