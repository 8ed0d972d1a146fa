"""The map: which device is on which node, which ranks and replica groups use it, is it well.

Many to many: several slots may share a GPU, and a rank may use several. Where NVML tells whose
processes hold memory on a device, that is believed; elsewhere a slot's device is the rank's. A
device keeps its id through restarts and new generations, because the id is the hardware's (or, of
a CPU slot, the machine's). Nothing is shown of ranks that are gone, nor of a device that its node
no longer has.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from perdure.model.devices import DeviceSample, name_throttle
from perdure.model.events import AnyEvent, DeviceReported, NodeRegistered, NodeRestored
from perdure.model.job import JobSpec
from perdure.model.progress import NodeBeat
from perdure.model.report import DeviceRow, RankRow

STALE_S = 60.0
"""A look older than this says nothing about who uses the device now."""


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
                known = {*event.device_ids, f"node {event.node}"}
                gone = [d for d, f in self.faults.items() if f.node == event.node]
                for device in gone:
                    if device not in known:
                        del self.faults[device]
            case DeviceReported(healthy=False):
                fault = Fault(event.node, event.reason, event.source)
                self.faults[event.device] = fault
            case DeviceReported():
                self.faults.pop(event.device, None)
            case NodeRestored():
                gone = [d for d, f in self.faults.items() if f.node == event.node]
                for device in gone:
                    del self.faults[device]
            case _:
                pass


@dataclass(slots=True)
class NodeStates:
    """Of which nodes something is to be said beside their devices."""

    lost: set[int]
    cordoned: set[int]
    draining: set[int]


class DeviceView:
    """The newest looks at devices, which came with heartbeats."""

    def __init__(self, spec: JobSpec) -> None:
        """Begin without any."""
        self._spec = spec
        self._looks: dict[tuple[int, str], DeviceSample] = {}

    def observe(self, beat: NodeBeat) -> None:
        """Take a heartbeat's looks."""
        for sample in beat.devices:
            self._looks[beat.node, sample.device] = sample

    def make_rows(
        self, now: float, fold: DeviceFold, ranks: Sequence[RankRow], states: NodeStates
    ) -> tuple[DeviceRow, ...]:
        """Return one row a device, those included that run nothing now."""
        spec = self._spec
        rows: dict[tuple[int, str], tuple[list[int], list[int]]] = {}
        for node, devices in fold.slots.items():
            for slot, device in enumerate(devices):
                rows.setdefault((node, device), ([], []))[0].append(slot)
        here: dict[int, list[RankRow]] = {}
        for rank in ranks:
            here.setdefault(rank.node, []).append(rank)
            slot = rank.rank % spec.nproc
            if rank.node not in fold.slots:
                slots = rows.setdefault((rank.node, name_slot(rank.node, slot)), ([], []))[0]
                slots.append(slot)
        found = []
        for node, device in sorted(rows, key=lambda key: (key[0], rows[key][0])):
            slots = rows[node, device][0]
            mine = here.get(node, []) if node not in states.lost else []
            found.append(self._make(now, fold, node, device, slots, mine, states))
        return tuple(found)

    def _make(
        self,
        now: float,
        fold: DeviceFold,
        node: int,
        device: str,
        slots: list[int],
        here: list[RankRow],
        states: NodeStates,
    ) -> DeviceRow:
        spec, look = self._spec, self._looks.get((node, device))
        if look is not None and now - look.at_s > STALE_S:
            look = None
        placed = {row.rank for row in here if row.rank % spec.nproc in slots}
        if look is not None and self._tells_ranks(now, node):
            placed = {row.rank for row in here if row.rank in look.ranks}
        mine = [row for row in here if row.rank in placed]
        fault = fold.faults.get(device) or fold.faults.get(f"node {node}")
        health, why = "", ""
        if fault is not None:
            health, why = "failed", f"{fault.reason} ({fault.source})"
        elif look is not None:
            why = find_warning(look)
            health = "warn" if why else "ok"
        grouped = spec.torchft.replicas > 0
        return DeviceRow(
            device=device,
            node=node,
            ranks=tuple(sorted(placed)),
            replicas=tuple(sorted({r // spec.nproc for r in placed})) if grouped else (),
            state=find_device_state(node, mine, states),
            slots=tuple(name_slot(node, slot) for slot in slots),
            kind=look.kind if look is not None else "cpu" if device.startswith("cpu-") else "",
            name=look.name if look is not None else "",
            host=fold.hosts.get(node, ""),
            health=health,
            why=why,
            sample=look,
        )

    def _tells_ranks(self, now: float, node: int) -> bool:
        """Whether any of the node's looks knows a rank: else NVML sees no process of ours."""
        return any(
            look.ranks and now - look.at_s <= STALE_S
            for (where, _), look in self._looks.items()
            if where == node
        )


def name_slot(node: int, slot: int) -> str:
    """Return the name that a slot has where nothing is known of its device."""
    return f"node{node}/slot{slot}"


def find_device_state(node: int, ranks: Sequence[RankRow], states: NodeStates) -> str:
    """Return what a device does, in words."""
    if node in states.lost:
        return "lost"
    if not ranks:
        return "cordoned" if node in states.cordoned else "spare"
    if node in states.draining:
        return "draining"
    over = all(row.state in ("exited", "failed") for row in ranks)
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
