"""Slurm's host lists: `n[0-3,7],x01` written out. Pure, so that no process is started for a name."""

import re
from itertools import product

_BRACKETS = re.compile(r"\[([^\[\]]*)\]")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")


def expand(hostlist: str) -> tuple[str, ...]:
    """Every host of a bracketed list, in its own order: `n[08-10],x` is n08, n09, n10, x.

    Raises `ValueError` for what Slurm itself would not write.
    """
    if hostlist in ("", "(null)"):
        return ()
    return tuple(host for part in _split(hostlist) for host in _hosts(part))


def _split(hostlist: str) -> list[str]:
    """Cut at the commas that are outside brackets."""
    parts, depth, start = [], 0, 0
    for place, character in enumerate(hostlist):
        depth += (character == "[") - (character == "]")
        if depth not in (0, 1):
            raise ValueError(f'host list "{hostlist}" has brackets that do not match')
        if character == "," and depth == 0:
            parts.append(hostlist[start:place])
            start = place + 1
    parts.append(hostlist[start:])
    if depth or not all(parts):
        raise ValueError(f'host list "{hostlist}" has brackets that do not match or an empty name')
    return parts


def _hosts(part: str) -> list[str]:
    """One name with its brackets written out, the last bracket running fastest."""
    pieces = _BRACKETS.split(part)  # text, ranges, text, ranges, …, text
    choices = [_numbers(piece, part) if odd % 2 else [piece] for odd, piece in enumerate(pieces)]
    return ["".join(choice) for choice in product(*choices)]


def _numbers(ranges: str, part: str) -> list[str]:
    """The numbers of one bracket; leading zeros are kept."""
    numbers = []
    for item in ranges.split(","):
        match = _RANGE.fullmatch(item)
        first, last = (match[1], match[2] or match[1]) if match else ("1", "0")
        if int(last) < int(first):
            raise ValueError(f'host list "{part}" has "{item}" where a number or a rising range was expected')
        numbers += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    return numbers
