"""What a run does about faults: how often its state is kept in memory, and when it gives up."""

from typing import Self

from pydantic import Field, model_validator

from danlu.spec.description import MAX_COUNT, SpecModel


class TlsFiles(SpecModel):
    """Certificates for the connections by which the hosts of a run meet: PEM files, at the same place on every host."""

    certificate: str = Field(max_length=4096)
    """What a host shows to the others."""
    key: str = Field(max_length=4096)
    """The certificate's key, without a password."""
    authority: str = Field(max_length=4096)
    """Who signed the certificates: hosts without one of theirs are refused."""

    @model_validator(mode="after")
    def _absolute(self) -> Self:
        for name in ("certificate", "key", "authority"):
            if not (path := getattr(self, name)).startswith("/"):
                raise ValueError(
                    f'`{name}` must be an absolute path, since every host reads it, but is "{path}"\n'
                    f'{name} = "/…/{path}"'
                )
        return self


class ResilienceConfig(SpecModel):
    """A rank that dies or hangs is replaced, and the run goes on from its newest state."""

    restarts: int = Field(default=5, ge=0, le=1000)
    """Faults in a row without a new step between them before the run stops; 0 stops at the first fault."""
    snapshots: int = Field(default=1, ge=0, le=MAX_COUNT)
    """Steps between copies of the state in its host's memory: what a fault costs at most. With 0, none is taken, and a
    fault costs the steps since the last checkpoint."""
    peers: int = Field(default=0, ge=0, le=MAX_COUNT)
    """Steps between copies of the state in another host's memory, sent in the background: what a lost host costs at
    most, unless a replica of its ranks is on another host, which then costs nothing. With 0, none is sent, and a lost
    host without replicas costs the steps since the last checkpoint."""
    vote: bool = True
    """Compare each snapshot with those of its replicas, if there are any: a rank that differs from most of them is
    replaced, and all go back to the state before."""
    shrink: float = Field(default=0.5, gt=0, le=1)
    """When a host is lost and none waits: least share of the run's ranks to go on with, on the hosts that are left and
    with the same batches. With 1 the run never goes on with fewer; under Slurm its job is then requeued."""

    tls: TlsFiles | None = None
    """Encrypt what the ranks, agents and coordinator of several hosts tell each other to meet and to recover.

    Gradients, activations and copies of states take connections of their own, which it does not change.
    """

    @model_validator(mode="after")
    def _copies_are_of_snapshots(self) -> Self:
        if self.peers and (not self.snapshots or self.peers % self.snapshots):
            raise ValueError(
                f"`peers` must be a multiple of `snapshots`, but is {self.peers} with {self.snapshots}: what is copied "
                "to another host is a snapshot"
            )
        return self
