"""Faults that can be injected into a run, and how often each occurs in practice."""

from typing import Literal, get_args

InjectedFault = Literal[
    "kill", "segfault", "abort", "exception", "reset", "preempt", "host", "stop", "lock", "corrupt", "straggle"
]
"""`kill`, `segfault`, `abort`: the process of a rank ends by that signal. `exception`: its program raises an error.
`reset`: its connections break. `preempt`: SIGTERM, the run saves and stops. `host`: all its processes end at once.
`stop`: its process is stopped. `lock`: one of its threads keeps Python's lock. `corrupt`: a bit of a gradient flips,
and the value stays finite. `straggle`: it computes half as long again, for a while."""
INJECTED_FAULTS: tuple[InjectedFault, ...] = get_args(InjectedFault)

FAULT_MIXES: dict[str, dict[InjectedFault, float]] = {
    # Llama 3 405B, 54 days on 16,384 H100, 419 unexpected interruptions by cause (arXiv:2407.21783, table 5): chips and
    # memory as sudden ends, software as errors, network, maintenance, hosts, hangs, silent corruption.
    "llama3": {
        "kill": 31.0,
        "segfault": 16.0,
        "abort": 16.0,
        "exception": 13.0,
        "reset": 10.0,
        "preempt": 8.0,
        "host": 3.0,
        "stop": 1.0,
        "lock": 1.0,
        "corrupt": 1.4,
    },
    "processes": {"kill": 1.0, "segfault": 1.0, "abort": 1.0, "exception": 1.0},
    "hangs": {"stop": 1.0, "lock": 1.0},
}
