"""What one rank sends and holds in one step, as a dry run finds it."""

from danlu.spec.description import Bytes, Count, Description, Many


class Collective(Description):
    """Calls of one collective that are alike."""

    operation: str
    dtype: str
    size: Bytes
    """Bytes the rank puts into one call."""
    axes: str
    """Axes of the mesh its group lies along."""
    ranks: Count
    level: str = ""
    """Innermost level of the network that joins the group; empty without a cluster."""
    count: Count

    @property
    def total(self) -> int:
        """Bytes of all calls."""
        return self.size * self.count


class Trace(Description):
    """One optimiser step of one rank."""

    rank: int
    world: Count
    collectives: Many[Collective]
    peak: Bytes
    """Most bytes of tensors alive at once."""
    peak_by_kind: dict[str, int]
    """The same by what they were for."""
