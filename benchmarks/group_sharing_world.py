"""A world whose layouts share their groups, so that dozens of layouts can be built at once."""

from collections.abc import Sequence

from torch.distributed import ProcessGroup

from danlu.comm.world import World

_groups: dict[tuple[int, ...], ProcessGroup | None] = {}


class GroupSharingWorld(World):
    """Makes a group once for the same members.

    Every group of gloo has a thread that looks at its sockets a hundred times a second. Those of twenty layouts on
    eight ranks, several hundred, took most of two cores.
    """

    def new_group(self, members: Sequence[int], name: str) -> ProcessGroup | None:
        """The group of these ranks, made when it is first asked for."""
        key = tuple(members)
        if key not in _groups:
            _groups[key] = super().new_group(members, name)
        return _groups[key]
