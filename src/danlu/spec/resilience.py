"""What a run does about faults: how often its state is kept in memory, and when it gives up."""

from pydantic import Field

from danlu.spec.description import MAX_COUNT, SpecModel


class ResilienceConfig(SpecModel):
    """A rank that dies or hangs is replaced, and the run goes on from its newest state."""

    restarts: int = Field(default=5, ge=0, le=1000)
    """Faults in a row without a new step between them before the run stops; 0 stops at the first fault."""
    snapshots: int = Field(default=1, ge=0, le=MAX_COUNT)
    """Steps between copies of the state in its host's memory: what a fault costs at most. With 0, none is taken, and a
    fault costs the steps since the last checkpoint."""
