"""The rules of the Chrome trace format that Perfetto relies on, for the events that Danlu writes."""

from typing import Any


def check_trace(trace: dict[str, Any]) -> list[int]:
    """Fail if a rule is broken; the processes of the trace, each of which has a name, as has every track."""
    tracks: dict[tuple[int, int], list[dict[str, Any]]] = {}
    named: dict[str, set[tuple[int, int]]] = {"process_name": set(), "thread_name": set()}
    assert set(trace) == {"displayTimeUnit", "otherData", "traceEvents"}
    for event in trace["traceEvents"]:
        assert {"ph", "ts", "pid", "tid", "name"} <= set(event)
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        assert event["ph"] in ("X", "M")
        where = event["pid"], event["tid"]
        if event["ph"] == "M":
            assert list(event["args"]) in (["name"], ["labels"], ["sort_index"])
            named.setdefault(event["name"], set()).add(where)
        else:
            assert event["ts"] >= 0
            assert event["dur"] >= 0
            assert event["name"]
            tracks.setdefault(where, []).append(event)
    assert set(tracks) == named["thread_name"]
    assert {pid for pid, _ in tracks} == {pid for pid, _ in named["process_name"]}
    for events in tracks.values():
        _check_nesting(events)
    return sorted({pid for pid, _ in tracks})


def _check_nesting(events: list[dict[str, Any]]) -> None:
    """Of two events of a track, one is inside the other or after it; times are rounded to a nanosecond."""
    rounded, stack = 0.0021, list[float]()
    for event in sorted(events, key=lambda event: (event["ts"], -event["dur"])):
        start, end = event["ts"], event["ts"] + event["dur"]
        while stack and start >= stack[-1] - rounded:
            stack.pop()
        assert not stack or end <= stack[-1] + rounded, event
        stack.append(end)
