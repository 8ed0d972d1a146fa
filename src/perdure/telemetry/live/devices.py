"""The map: which device is on which node, which ranks and replica groups use it, is it well.

Many to many: several slots may share a GPU, and a rank may use several. Where NVML tells whose
processes hold memory on a device, that is believed; elsewhere a slot's device is the rank's. A
device keeps its id through restarts and new generations, because the id is the hardware's (or, of
a CPU slot, the machine's). Nothing is shown of ranks that are gone, nor of a device that its node
no longer has.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from perdure.model.events import (
    AnyEvent,
    DeviceReported,
    NodeCordoned,
    NodeDraining,
    NodeLost,
    NodeRegistered,
    NodeRestored,
)
from perdure.model.job import JobSpec
from perdure.model.report import DeviceRow, RankRow
from perdure.model.signals.devices import DeviceSample, name_throttle
from perdure.model.signals.progress import NodeBeat

STALE_S = 60.0
"""A look older than this says nothing about who uses the device now."""
_OVER = ("exited", "failed")


@dataclass(slots=True)
class Fault:
    """What is wrong with a device."""

    node: int
    reason: str
    source: str


@dataclass(slots=True)
class DeviceFold:
    """What the journal says of devices; bounded by what there is."""

    slots: dict[int, tuple[str, ...]] = field(default_factory=dict)
    """Node -> the device of each of its slots."""
    hosts: dict[int, str] = field(default_factory=dict)
    faults: dict[str, Fault] = field(default_factory=dict)

    def add(self, event: AnyEvent) -> None:
        """Take the next event."""
        match event:
            case NodeRegistered():
                self.slots[event.node] = event.device_ids
                self.hosts[event.node] = event.host
                self._forget_faults(event.node, {*event.device_ids, f"node {event.node}"})
            case DeviceReported(healthy=False):
                self.faults[event.device] = Fault(event.node, event.reason, event.source)
            case DeviceReported():
                self.faults.pop(event.device, None)
            case NodeRestored():
                self._forget_faults(event.node, set())

    def _forget_faults(self, node: int, there: set[str]) -> None:
        """Forget what was wrong on a node, but for those of its devices that are still there."""
        self.faults = {d: f for d, f in self.faults.items() if f.node != node or d in there}


@dataclass(slots=True)
class NodeStates:
    """The nodes of which something is to be said beside their devices."""

    lost: set[int] = field(default_factory=set)
    cordoned: set[int] = field(default_factory=set)
    draining: set[int] = field(default_factory=set)
    """Nodes that their ranks are about to leave."""

    def add(self, event: AnyEvent) -> None:
        """Take the next event."""
        match event:
            case NodeRegistered():
                self.lost.discard(event.node)
            case NodeLost():
                self.lost.add(event.node)
            case NodeDraining(over=False):
                self.draining.add(event.node)
            case NodeDraining():
                self.draining.discard(event.node)
            case NodeCordoned():
                self.cordoned.add(event.node)
                self.draining.discard(event.node)
            case NodeRestored():
                self.cordoned.discard(event.node)
                self.draining.discard(event.node)


class DeviceView:
    """The newest looks at devices, which came with heartbeats, and the rows made with them.

    Of a large job nearly all devices do what they did: a node's rows are made again only when its
    ranks have moved or ended, a look at its devices is new or has grown old, or the journal says
    something else of any device.
    """

    def __init__(self, spec: JobSpec) -> None:
        """Begin without any."""
        self._spec = spec
        self._looks: dict[int, dict[str, DeviceSample]] = {}
        self._expire_s: dict[int, float] = {}
        """Node -> when the next of its looks grows old."""
        self._rows: dict[int, tuple[DeviceRow, ...]] = {}
        self._ranks: tuple[RankRow, ...] = ()
        self._here: dict[int, dict[int, bool]] = {}
        """Node -> its ranks, and whether each is over."""
        self._known: tuple[object, ...] = ()
        self._made_s = 0.0
        self._changed: set[int] = set()

    def take_beat(self, beat: NodeBeat) -> None:
        """Take a heartbeat's looks."""
        if beat.devices:
            looks = self._looks.setdefault(beat.node, {})
            looks |= {sample.device: sample for sample in beat.devices}
            self._changed.add(beat.node)

    def make_rows(
        self, now: float, fold: DeviceFold, ranks: tuple[RankRow, ...], states: NodeStates
    ) -> tuple[DeviceRow, ...]:
        """Return one row a device, those included that run nothing now."""
        self._place(ranks)
        known = (
            dict(fold.slots),
            dict(fold.hosts),
            dict(fold.faults),
            (set(states.lost), set(states.cordoned), set(states.draining)),
        )
        if known != self._known or now < self._made_s:
            self._rows = {}
        self._known, self._made_s = known, now
        for node, expire_s in self._expire_s.items():
            if now > expire_s:
                self._changed.add(node)
        found: list[DeviceRow] = []
        for node in sorted(fold.slots.keys() | self._here.keys()):
            rows = self._rows.get(node)
            if rows is None or node in self._changed:
                rows = self._rows[node] = self._make_node(now, fold, node, states)
            found += rows
        self._changed.clear()
        return tuple(found)

    def _place(self, ranks: tuple[RankRow, ...]) -> None:
        """Know which rank is where; note the nodes of those that have moved or ended."""
        if len(ranks) != len(self._ranks):
            self._rows, self._here, self._ranks = {}, {}, ()
        for index, row in enumerate(ranks):
            old = self._ranks[index] if self._ranks else None
            if old is row:
                continue
            over = row.state in _OVER
            if old is not None:
                same = old.node == row.node and old.rank == row.rank
                if same and (old.state in _OVER) == over:
                    continue
                here = self._here[old.node]
                here.pop(old.rank, None)
                if not here:
                    del self._here[old.node]
                self._changed.add(old.node)
            self._here.setdefault(row.node, {})[row.rank] = over
            self._changed.add(row.node)
        self._ranks = ranks

    def _make_node(
        self, now: float, fold: DeviceFold, node: int, states: NodeStates
    ) -> tuple[DeviceRow, ...]:
        nproc = self._spec.nproc
        here = self._here.get(node, {})
        devices: dict[str, list[int]] = {}
        for slot, device in enumerate(fold.slots.get(node, ())):
            devices.setdefault(device, []).append(slot)
        if node not in fold.slots:
            for slot in sorted({rank % nproc for rank in here}):
                devices[name_slot(node, slot)] = [slot]
        looks = self._looks.get(node, {})
        fresh = {d: look for d, look in looks.items() if now - look.at_s <= STALE_S}
        self._expire_s[node] = min(
            (look.at_s + STALE_S for look in fresh.values()), default=float("inf")
        )
        if node in states.lost:
            here = {}
        told = any(look.ranks for look in fresh.values())  # Else NVML sees no process of ours.
        rows = []
        for device, slots in sorted(devices.items(), key=lambda item: item[1]):
            look = fresh.get(device)
            if look is not None and told:
                placed = {rank: over for rank, over in here.items() if rank in look.ranks}
            else:
                placed = {rank: over for rank, over in here.items() if rank % nproc in slots}
            rows.append(self._make(fold, node, device, slots, placed, look, states))
        return tuple(rows)

    def _make(
        self,
        fold: DeviceFold,
        node: int,
        device: str,
        slots: list[int],
        placed: dict[int, bool],
        look: DeviceSample | None,
        states: NodeStates,
    ) -> DeviceRow:
        nproc = self._spec.nproc
        fault = fold.faults.get(device) or fold.faults.get(f"node {node}")
        health, why = "", ""
        if fault is not None:
            health, why = "failed", f"{fault.reason} ({fault.source})"
        elif look is not None:
            why = find_warning(look)
            health = "warn" if why else "ok"
        return DeviceRow(
            device=device,
            node=node,
            ranks=tuple(sorted(placed)),
            replicas=tuple(sorted({r // nproc for r in placed})) if self._spec.groups else (),
            state=describe_device_state(node, placed, states),
            slots=tuple(name_slot(node, slot) for slot in slots),
            kind=look.kind if look is not None else "cpu" if device.startswith("cpu-") else "",
            name=look.name if look is not None else "",
            host=fold.hosts.get(node, ""),
            health=health,
            why=why,
            sample=look,
        )


def name_slot(node: int, slot: int) -> str:
    """Return the name that a slot has where nothing is known of its device."""
    return f"node{node}/slot{slot}"


def describe_device_state(node: int, ranks: Mapping[int, bool], states: NodeStates) -> str:
    """Return what a device does, in words; `ranks` says of each that uses it whether it is over."""
    if node in states.lost:
        return "lost"
    if not ranks:
        return "cordoned" if node in states.cordoned else "spare"
    if node in states.draining:
        return "draining"
    over = all(ranks.values())
    return ("idle" if over else "in use") + (", cordoned" if node in states.cordoned else "")


def find_warning(look: DeviceSample) -> str:
    """Return what deserves a look and is no failure; empty for nothing."""
    words = []
    if look.error:
        words.append(look.error)
    if look.remap_pending:
        words.append("a memory row is remapped with its next reset")
    if look.ecc_uncorrected > 0:
        words.append(f"{look.ecc_uncorrected} uncorrectable memory errors")
    if look.xids:
        words.append(f"XID {', '.join(str(code) for code in sorted({x.code for x in look.xids}))}")
    held_down = look.throttle & ~0x4
    if held_down and name_throttle(held_down) and look.ranks:
        words.append(name_throttle(held_down))
    return "; ".join(words)
