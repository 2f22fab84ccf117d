"""What the agents of nodes and the coordinator of their job say to each other, through the coordinator's store."""

from danlu.comm.store_client import StoreClient
from danlu.resilience.diagnosis import Culprit
from danlu.spec.description import SpecModel, TupleOf

AGENT_LEASE_SECONDS = 5.0
"""An agent that has not reached the store for so long kills its ranks: others may take their places soon."""
COORDINATOR_SECONDS = 60.0
"""How long an agent waits for another coordinator where one was killed: the node answers, but nobody serves there."""
NODE_LEASE_SECONDS = 8.0
"""A node that was not heard of for so long is lost; longer than the other, so that its ranks are surely gone."""
STATUS_SECONDS = 1.0
"""A status is written when it changes, and at least so often."""


class RankStatus(SpecModel):
    """A rank as the agent of its node sees it."""

    rank: int
    generation: int
    """Of the order that started it: 0 for the first start."""
    pid: int
    code: int | None
    """Exit code, negative for a signal; None while it runs."""
    why: str
    """How it ended, in one line."""
    phase: str
    trains: bool
    """Whether it has come to its first step since it started."""
    joined: int
    """The newest world that it reported."""
    lost: int
    """The newest world in which its connections broke; -1 if none did."""


class NodeStatus(SpecModel):
    """A node as its agent sees it."""

    number: int
    """Statuses so far: one that does not grow is of an agent that is gone."""
    order: int
    """The newest order that was carried out."""
    ranks: TupleOf[RankStatus] = ()
    is_importing: bool = False
    is_stopping: bool = False
    """Slurm wants the job to end."""
    step: int = 0
    """Steps done by the rank that is furthest."""
    hangs: int = 0
    """Hangs that were found so far."""
    culprits: TupleOf[tuple[int, str, int, str, int]] = ()
    """Ranks that keep the others from going on in the newest of them: rank, cause, step, phase, pid."""
    quiet: float = 0.0
    """Seconds since any rank of the node moved."""
    slow: TupleOf[str] = ()
    """Ranks that keep the others of the node waiting, in words; each is told once."""


class NodeOrder(SpecModel):
    """What an agent is to do, in this order."""

    kill: TupleOf[int] = ()
    """Ranks to kill."""
    endpoint: str = ""
    """Where new ranks meet the others."""
    regroup: str = ""
    """A `RegroupOrder` as JSON, for ranks that run and for those that start."""
    start: TupleOf[tuple[int, int]] = ()
    """Ranks to start, with their numbers on the node."""
    world_size: int = 0
    """Ranks of the world that they are in."""
    refuse: bool = False
    """Tell the ranks that no order will come: the run ends."""
    leave: bool = False
    """The run is over."""


def status_key(node: str) -> str:
    """Where a node's newest status is."""
    return f"status/{node}"


def node_of(key: str) -> str:
    """The node whose status a key is for; empty for other keys."""
    kind, _, node = key.partition("/")
    return node if kind == "status" else ""


def order_key(node: str, number: int) -> str:
    """Where the order of this number, from 1, for a node is."""
    return f"order/{node}/{number}"


def wait_for_order(store: StoreClient, node: str, number: int, seconds: float) -> NodeOrder | None:
    """The order of this number, if it comes within so many seconds."""
    key = order_key(node, number)
    if not store.wait([key], seconds) or (raw := store.get(key)) is None:
        return None
    return NodeOrder.model_validate_json(raw)


def pack_culprit(culprit: Culprit) -> tuple[int, str, int, str, int]:
    """As a status carries it."""
    return culprit.rank, culprit.cause, culprit.step, culprit.phase, culprit.pid
