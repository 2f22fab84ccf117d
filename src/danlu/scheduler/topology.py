"""Slurm's description of the network, and the order of ranks that follows it."""

import re
from collections.abc import Iterable, Sequence
from typing import TypeVar

from danlu.scheduler.hostlist import expand_hostlist
from danlu.spec.description import SpecModel, TupleOf

T = TypeVar("T", str, list[str])

_FIELD = re.compile(r"(\w+)=(\S*)")


class Switch(SpecModel):
    """One switch of Slurm's tree: a leaf holds nodes, the others hold switches."""

    name: str
    nodes: TupleOf[str] = ()
    """Nodes below it, however deep."""
    switches: TupleOf[str] = ()
    """Switches directly below it."""


class NodeOrder(SpecModel):
    """Nodes in the order of their ranks, and a remark on that order."""

    nodes: TupleOf[str]
    remark: str
    """One line: what the order follows, or why it does not follow the network."""


def parse_topology(text: str) -> tuple[Switch, ...]:
    """Parse the output of `scontrol show topology`; empty when Slurm has no tree of switches.

    Raises `ValueError` with the line for anything that is not a switch.
    """
    switches = []
    for line in filter(None, map(str.strip, text.splitlines())):
        fields = dict(_FIELD.findall(line))
        if "SwitchName" not in fields:
            raise ValueError(f'"{line}" is not a line about a switch (SwitchName=…)')
        nodes, children = expand_hostlist(fields.get("Nodes", "")), expand_hostlist(fields.get("Switches", ""))
        switches.append(Switch(name=fields["SwitchName"], nodes=nodes, switches=children))
    return tuple(switches)


def order_nodes(nodes: Sequence[str], switches: Iterable[Switch], first: str) -> NodeOrder:
    """Order `nodes` so that neighbors share the lowest switch, starting with the node `first`.

    Depth-first over the switches; at every level the branch that holds `first` comes before the
    others, which keep the order Slurm lists them in. Nodes on no switch go to the end in the order
    given. The result depends on the arguments alone: the same job on the same nodes has the same
    ranks.
    """
    if first not in nodes:
        raise ValueError(f"the first node must be one of {', '.join(nodes)}, but is {first} instead")
    by_name = {switch.name: switch for switch in switches}
    if not by_name:
        order = _first_to_front(nodes, first)
        return NodeOrder(
            nodes=tuple(order), remark="Slurm has no topology: ranks follow Slurm's own order of the nodes"
        )
    walk = _TopologyWalk(by_name, nodes, first)
    children = {child for switch in by_name.values() for child in switch.switches}
    roots = [walk.nodes_under(name) for name in by_name if name not in children]
    found = [node for root in _first_to_front(roots, first) for node in root]
    lost = [node for node in nodes if node not in walk.visited_nodes]
    remark = f"ranks follow the topology; leaf switches: {walk.leaves}, nodes on them: {len(found)} of {len(nodes)}"
    if lost:
        remark += f"; {', '.join(lost[:8])}{' …' if len(lost) > 8 else ''} are on no switch and come last"
    return NodeOrder(nodes=tuple(_first_to_front([*found, *lost], first)), remark=remark)


class _TopologyWalk:
    """Depth-first over the switches; a node on two of them belongs to the first."""

    def __init__(self, switches: dict[str, Switch], nodes: Sequence[str], first: str) -> None:
        self.switches = switches
        self.node_index = {node: index for index, node in enumerate(nodes)}
        self.first = first
        self.visited_nodes: set[str] = set()
        self.visited_switches: set[str] = set()
        self.leaves = 0

    def nodes_under(self, name: str) -> list[str]:
        """The job's nodes under a switch, in order."""
        if name not in self.switches:
            raise ValueError(f"Slurm's topology names the switch {name} but does not describe it")
        if name in self.visited_switches:
            return []
        self.visited_switches.add(name)
        switch = self.switches[name]
        branches = [self.nodes_under(child) for child in switch.switches]
        own = [node for node in switch.nodes if node in self.node_index and node not in self.visited_nodes]
        if own:
            own.sort(key=self.node_index.__getitem__)
            self.visited_nodes.update(own)
            self.leaves += 1
            branches.append(_first_to_front(own, self.first))
        return [node for branch in _first_to_front(branches, self.first) for node in branch]


def _first_to_front(items: Sequence[T], first: str) -> list[T]:
    """The item that is, or contains, the first node in front; the others in their order."""

    def holds(item: T) -> bool:
        return item == first if isinstance(item, str) else first in item

    return sorted(items, key=lambda item: not holds(item))
