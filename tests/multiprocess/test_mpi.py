"""Collectives of MPI in the place of torch's, on ranks that Open MPI starts."""

import subprocess
import sys
from pathlib import Path

RANK = Path(__file__).parent / "mpi_rank.py"
RANKS = 3


def test_collectives_go_through_mpi(tmp_path: Path) -> None:
    options = ["--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-x", "OMP_NUM_THREADS=1"]
    options += ["--mca", "mpi_yield_when_idle", "1"]  # there are more ranks than cores
    command = ["mpirun", "-n", str(RANKS), *options, sys.executable, str(RANK), str(tmp_path)]
    ended = subprocess.run(command, timeout=900, capture_output=True, text=True)
    told = [(tmp_path / f"{rank}.txt").read_text() for rank in range(RANKS)]
    assert told == ["passed"] * RANKS
    assert ended.returncode == 0, ended.stderr
