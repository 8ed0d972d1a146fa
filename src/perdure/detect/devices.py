"""A device's own counters to the word that it is sick: errors at once, slow clocks after a while.

What is looked at, and why that: XIDs that are the hardware's and not the script's (NVIDIA's "Xid
Errors" catalogue tells them apart), uncorrectable memory errors that grow, or pages retired for
them, rows that can no longer be remapped, and a clock held down by heat or by the power supply.
GPU-Util is not looked at: a device on its way out shows 100 % like any other, and a waiting one as
well.

A device that has failed stays so until somebody says otherwise (`perdure node restore`, `perdure
node notify device-ok`); a slow one recovers by itself. What was journaled comes back through
`note`, so a new controller neither forgets a fault nor reports it twice.
"""

from dataclasses import dataclass, field

from perdure.model.events import AnyEvent, DeviceReported, NodeRegistered, NodeRestored
from perdure.model.signals.devices import (
    HW_SLOWDOWN,
    HW_THERMAL,
    POWER_BRAKE,
    POWER_CAP,
    SW_THERMAL,
    DeviceSample,
    name_throttle,
)
from perdure.model.signals.progress import NodeBeat

SOURCE = "nvml"
FATAL_XIDS = {
    46: "GPU stopped processing",
    48: "uncorrectable memory error",
    61: "internal microcontroller halted",
    62: "internal microcontroller halted",
    64: "row remapping failed",
    69: "graphics engine class error",
    74: "NVLink error",
    79: "GPU has fallen off the bus",
    95: "uncontained memory error",
    109: "context switch timed out",
    110: "security fault",
    119: "GSP does not answer",
    120: "GSP error",
    136: "link training failed",
    140: "unrecovered memory error",
    143: "GPU initialization failed",
    155: "NVLink software error",
    156: "resource retirement",
    158: "GPU fatal timeout",
}
"""The hardware's own. Left out: what a script brings about (13, 31, 43, 45), what the device has
mended (63: a row was remapped; 92, 94: contained)."""
_HELD_DOWN = HW_SLOWDOWN | SW_THERMAL | HW_THERMAL | POWER_BRAKE
SLOW_SHARE = 0.7
"""Below this share of its highest clock a throttled device slows its ranks down."""
SLOW_S = 30.0
"""Seconds after which a GPU whose clock is held down by heat or lack of power is unhealthy."""
CAPPED_SHARE = 0.6
"""Of its power limit: a device that is capped at less draws what something else allows it."""
PEERS_MIN = 3
PEER_AGE_S = 30.0
RECOVER_FACTOR = 2.0
"""A slow device is well again after this multiple of the time that made it slow."""


@dataclass(slots=True)
class _Health:
    node: int = -1
    failed: str = ""
    """Why, as reported; empty while it is well."""
    slow: bool = False
    """What was reported is a slow clock, which may pass."""
    outside: bool = False
    """An outside monitor has said so, and only it takes it back."""
    cleared_s: float = float("-inf")
    ecc: int = -1
    pages: int = -1
    slow_since_s: float | None = None
    well_since_s: float | None = None
    newest: DeviceSample | None = None
    xids: set[tuple[int, float]] = field(default_factory=set)


class DeviceJudge:
    """Judges the devices of all nodes."""

    def __init__(self) -> None:
        """Begin with no devices."""
        self._devices: dict[str, _Health] = {}

    def take_beat(self, now: float, beat: NodeBeat) -> list[AnyEvent]:
        """Take a heartbeat's look at a node's devices; return whose health has changed."""
        out: list[AnyEvent] = []
        node = beat.node
        for sample in beat.devices:
            health = self._devices.setdefault(sample.device, _Health())
            health.node, health.newest = node, sample
            found = self._judge(health, sample)
            if found is not None:
                healthy, reason = found
                self._mark(health, healthy, reason, sample.at_s)
                out.append(
                    DeviceReported(
                        device=sample.device,
                        node=node,
                        at_s=now,
                        healthy=healthy,
                        reason=reason,
                        source=SOURCE,
                    )
                )
        return out

    def note(self, event: AnyEvent) -> None:
        """Take a journaled event, in replay as well."""
        match event:
            case DeviceReported():
                self._note_report(event)
            case NodeRestored():
                self._restore(event.node, event.at_s)
            case NodeRegistered():
                self._forget(event.node, event.device_ids)

    def _note_report(self, event: DeviceReported) -> None:
        health = self._devices.setdefault(event.device, _Health())
        health.node, health.outside = event.node, event.source != SOURCE and not event.healthy
        if event.healthy or event.reason != health.failed:
            self._mark(health, event.healthy, event.reason, event.at_s)

    def _restore(self, node: int, at_s: float) -> None:
        """Forget what was wrong with a node's devices: an operator has put it back to work."""
        for health in self._devices.values():
            if health.node == node:
                self._mark(health, True, "", at_s)

    def _forget(self, node: int, devices: tuple[str, ...]) -> None:
        """Forget the devices that a node no longer has."""
        self._devices = {d: h for d, h in self._devices.items() if h.node != node or d in devices}

    def _mark(self, health: _Health, healthy: bool, reason: str, at_s: float) -> None:
        health.failed = "" if healthy else reason
        health.slow = not healthy and reason.startswith("slow clock")
        health.slow_since_s = health.well_since_s = None
        if healthy:
            health.outside, health.cleared_s = False, max(health.cleared_s, at_s)

    def _judge(self, health: _Health, sample: DeviceSample) -> tuple[bool, str] | None:
        reason = self._find_error(health, sample)
        if reason:
            return None if health.failed and not health.slow else (False, reason)
        if health.failed and (health.outside or not health.slow):
            return None
        return self._weigh_clock(health, sample)

    def _find_error(self, health: _Health, sample: DeviceSample) -> str:
        """Return what the device says is broken; empty for nothing new."""
        errors = _count_more(health.ecc, sample.ecc_uncorrected)
        pages = _count_more(health.pages, sample.retired_pages)
        if sample.ecc_uncorrected >= 0:  # It begins at 0 again when the driver is loaded anew.
            health.ecc = sample.ecc_uncorrected
        if sample.retired_pages >= 0:
            health.pages = sample.retired_pages
        if sample.error.startswith("lost"):
            return f"device lost: {sample.error}"
        for xid in sample.xids:
            if xid.code in FATAL_XIDS and xid.at_s > health.cleared_s:
                return f"XID {xid.code}: {FATAL_XIDS[xid.code]}"
        if sample.remap_failed and health.cleared_s == float("-inf"):
            return "memory rows cannot be remapped any more"
        if errors:
            return f"{errors} uncorrectable memory errors more, {sample.ecc_uncorrected} in all"
        if pages:
            return (
                f"{pages} memory page{'s' if pages > 1 else ''} more retired for double-bit errors"
            )
        return ""

    def _weigh_clock(self, health: _Health, sample: DeviceSample) -> tuple[bool, str] | None:
        why, now = self._find_slow(sample), sample.at_s
        if not why:
            health.slow_since_s = None
            if not health.slow:
                return None
            if health.well_since_s is None:
                health.well_since_s = now
            over_s = now - health.well_since_s
            return (True, "its clock is up again") if over_s >= RECOVER_FACTOR * SLOW_S else None
        health.well_since_s = None
        if health.slow_since_s is None:
            health.slow_since_s = now
        lasted_s = now - health.slow_since_s
        if health.slow or lasted_s < SLOW_S:
            return None
        return False, f"slow clock for {lasted_s:.0f} s: {why}"

    def _find_slow(self, sample: DeviceSample) -> str:
        """Return why the device's clock is too low for its work; empty where it is not."""
        clock, top = sample.sm_clock_mhz, sample.sm_clock_max_mhz
        if clock < 0 or not sample.ranks:
            return ""  # An idle device saves power by the same means.
        figures = f"{clock} of {top} MHz at {sample.power_w:.0f} of {sample.power_limit_w:.0f} W"
        low = top > 0 and clock < SLOW_SHARE * top
        if low and sample.throttle & _HELD_DOWN:
            return f"{name_throttle(sample.throttle & _HELD_DOWN)}, {figures}"
        limit = sample.power_limit_w
        if low and sample.throttle & POWER_CAP and 0 <= sample.power_w < CAPPED_SHARE * limit:
            return f"capped far below its power limit, {figures}"
        usual = self._compute_peer_medians(sample)
        if usual is not None and clock < SLOW_SHARE * usual[0] and sample.power_w < usual[1]:
            return f"its peers run at {usual[0]} MHz, it at {figures}"
        return ""

    def _compute_peer_medians(self, sample: DeviceSample) -> tuple[int, float] | None:
        """Return clock and power in the middle of its peers that work; None for too few."""
        looks = (h.newest for d, h in self._devices.items() if d != sample.device and not h.failed)
        peers = [
            look
            for look in looks
            if look is not None and look.name == sample.name and look.ranks
            if look.sm_clock_mhz >= 0 and abs(look.at_s - sample.at_s) < PEER_AGE_S
        ]
        if len(peers) < PEERS_MIN:
            return None
        clocks = sorted(peer.sm_clock_mhz for peer in peers)
        powers = sorted(peer.power_w for peer in peers)
        return clocks[len(clocks) // 2], powers[len(powers) // 2]


def _count_more(known: int, told: int) -> int:
    """Return by how much a counter has grown; 0 where either is not known (-1)."""
    return max(0, told - known) if known >= 0 else 0
