"""What an operator points at: nodes, whichever way they are named.

A node is what is drained, cordoned, evicted and restored, because it is what a rank can be moved
off; a rank or a device stands for the node that it is on.
"""

from collections.abc import Sequence

from perdure.control.job import JobState


class UnknownTargetError(Exception):
    """There is no such thing; the message says what there is."""


def resolve_nodes(state: JobState, targets: Sequence[str]) -> tuple[int, ...]:
    """Return the nodes that `targets` name, each once, in order.

    `1` and `node:1` are nodes, `rank:3` is the node that runs rank 3 now, `replica:2` that of a
    replica group (torchft); anything else is the id of a device.

    Raises:
        UnknownTargetError: one of them names nothing.
    """
    if not targets:
        raise UnknownTargetError("no target: a node, a rank or a device")
    return tuple(sorted({_resolve_target(state, target) for target in targets}))


def _resolve_target(state: JobState, target: str) -> int:
    spec = state.the_spec()
    if spec.served:
        return _resolve_elsewhere(state, target)
    kind, _, text = target.rpartition(":")
    if kind in ("", "node") and text.isdecimal():
        if int(text) >= spec.num_nodes:
            raise UnknownTargetError(
                f"there is no node {text}: the nodes are 0 to {spec.num_nodes - 1}"
            )
        return int(text)
    if kind == "rank" and text.isdecimal():
        size = spec.groups * spec.nproc if spec.groups else spec.world_size
        if int(text) >= size:
            raise UnknownTargetError(f"there is no rank {text}: the ranks are 0 to {size - 1}")
        group = spec.node_of(int(text))
        return group if spec.groups or not state.world.placement else state.world.placement[group]
    if kind == "replica":
        if text.isdecimal() and int(text) < spec.groups:
            return int(text)
        there = f"the replicas are 0 to {spec.groups - 1}"
        what = there if spec.groups else "this is no torchft job"
        raise UnknownTargetError(f"there is no {target}: {what}")
    for node, registered in sorted(state.nodes.items()):
        slots = [f"node{node}/slot{slot}" for slot in range(registered.slots)]
        if target in registered.device_ids or target in slots:
            return node
    raise UnknownTargetError(
        f"there is no device `{target}`: `perdure status JOB --devices` lists them"
    )


def _resolve_elsewhere(state: JobState, target: str) -> int:
    """Return the group that `target` names, of those that others start: also by its replica id."""
    kind, _, text = target.rpartition(":")
    number = int(text) if text.isdecimal() else -1
    number = number // state.the_spec().nproc if kind == "rank" else number
    if kind in ("", "node", "replica", "rank") and number in state.worlds:
        return number
    for group in state.worlds.values():
        if target in (group.replica.name, group.replica.name.rpartition(":")[0]):
            return group.number
    there = name_all("replica", sorted(state.worlds)) if state.worlds else "no group yet"
    raise UnknownTargetError(f"there is no {target}; so far came {there}")


def name_all(noun: str, numbers: Sequence[int]) -> str:
    """Return them in words.

    >>> name_all("rank", [1]), name_all("replica", (1, 2)), name_all("rank", [])
    ('rank 1', 'replicas 1, 2', 'rank none')
    """
    return f"{noun}{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers)) or 'none'}"
