"""A spike that one rank alone sees: all ranks decide alike, go back together, and go on to the same bits."""

import json
from pathlib import Path
from typing import Any

from ranks import run_ranks
from spiking import SEQUENCES

RANK = Path(__file__).parent / "spike_rank.py"


def test_ranks_rewind_and_skip_together(tmp_path: Path) -> None:
    injections = [
        {"cursor": 47 * SEQUENCES, "kind": "loss", "size": 8.0, "rank": 1},
        {"cursor": 72 * SEQUENCES, "kind": "gradient", "size": 1e3, "rank": 0},
        {"cursor": 97 * SEQUENCES, "kind": "weights", "size": 4.0},
    ]
    cases: list[dict[str, Any]] = [
        {"policy": "rewind", "steps": 80, "degrees": {"shard": 2}, "injections": injections},
        {"policy": "skip", "steps": 60, "degrees": {"replicate": 2}, "injections": injections[:1]},
    ]
    (tmp_path / "cases.json").write_text(json.dumps(cases))
    run_ranks(RANK, 2, str(tmp_path), seconds=540)  # ranks that disagree wait for each other
    first, second = (json.loads((tmp_path / f"found-{rank}.json").read_text()) for rank in range(2))
    assert first == second, "every rank has seen, done and paid the same"
    rewound, skipped = first
    assert [spike["rewound_to"] is None for spike in rewound["spikes"]] == [False] * 3
    assert [(spike["step"], spike["action"]) for spike in skipped["spikes"]] == [(48, "skipped")]
    for case in first:
        assert case["equal"] and not case["missed"] and not case["false_alarms"]
