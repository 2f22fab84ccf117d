"""An S3 server that is killed in the middle of a save: the ranks train on, and save again when it is back."""

import json
import threading
import time
from pathlib import Path

import torch
from ranks import run_ranks
from s3_lab import S3Lab
from s3_rank import COLUMNS, ROWS, STEPS


def expected_losses() -> list[float]:
    """What two ranks compute that save nothing."""
    torch.set_num_threads(1)  # as the ranks do: a sum in another order may have another last bit
    weight, losses = torch.zeros(ROWS // 2, COLUMNS), []
    for step in range(1, STEPS + 1):
        weight.sub_(0.1 * (weight - torch.randn(weight.shape, generator=torch.Generator().manual_seed(step))))
        losses.append(float(2 * weight.square().mean()))
    return losses


def test_the_server_dies_in_the_middle_of_a_save(s3: S3Lab, tmp_path: Path) -> None:
    def kill_and_start_again() -> None:
        _wait_for(tmp_path / "begun")
        s3.kill()
        _wait_for(tmp_path / "done-0")
        s3.start()
        (tmp_path / "back").touch()

    hand = threading.Thread(target=kill_and_start_again)
    hand.start()
    run_ranks(Path(__file__).with_name("s3_rank.py"), 2, str(tmp_path), s3.endpoint, seconds=600)
    hand.join()
    told = [json.loads((tmp_path / f"told-{rank}").read_text()) for rank in range(2)]
    assert told[0]["losses"] == told[1]["losses"] == expected_losses(), "to the last bit"
    failed = dict(told[0]["failures"] + told[1]["failures"])
    assert {8, 10} & failed.keys(), failed
    assert all(failed.values())
    listed = json.loads((tmp_path / "steps-0").read_text())
    assert listed[-1] == STEPS and listed[0] in (4, 6), listed
    assert not failed.keys() & set(listed), "what failed must not be listed"


def _wait_for(path: Path) -> None:
    deadline = time.monotonic() + 600
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} does not appear"
        time.sleep(0.01)
