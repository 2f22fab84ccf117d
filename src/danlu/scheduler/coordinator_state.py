"""What a coordinator has decided, in the run's folder: another takes over from there when it is killed.

It is written before the orders that follow from it are given: an order that no agent has read yet is given again.
"""

from pathlib import Path

from pydantic import ValidationError

from danlu.scheduler.node_messages import NodeOrder
from danlu.scheduler.rank_map import RankMap
from danlu.scheduler.recovery import RecoveryState
from danlu.spec.description import SpecModel, TupleOf
from danlu.storage.store.atomic_files import atomic_replace

STATE_FILE = ".coordinator.json"


class CoordinatorState(SpecModel):
    """Of one start of a job."""

    job: int
    restart: int
    """Times Slurm has requeued the job."""
    started_at: float
    """When the first coordinator started, in seconds since the epoch."""
    place: TupleOf[str]
    """The node of every rank."""
    started_in: TupleOf[int]
    """The generation in which the process of every rank was started."""
    lost_nodes: TupleOf[str]
    orders: dict[str, int]
    """Orders given to every node so far."""
    unread: TupleOf[tuple[str, int, NodeOrder]]
    """Node, number and contents of orders that may not have been carried out yet."""
    recovery: RecoveryState


def save_state(run: Path, state: CoordinatorState) -> None:
    """Replace the file: whoever takes over sees the old one or the new one."""
    atomic_replace(run / STATE_FILE, state.model_dump_json() + "\n")


def load_state(run: Path, ranks: RankMap) -> CoordinatorState | None:
    """The state of this start of the job; None if no coordinator has started the ranks yet."""
    try:
        state = CoordinatorState.model_validate_json((run / STATE_FILE).read_bytes())
    except FileNotFoundError:
        return None
    except ValidationError as error:
        raise ValueError(f"{run / STATE_FILE} is not a file that a coordinator wrote: {error}") from None
    return state if (state.job, state.restart) == (ranks.job, ranks.restart) else None
