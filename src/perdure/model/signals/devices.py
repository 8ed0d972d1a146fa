"""What a device says of itself: the counters that tell a sick one from one that only works hard.

GPU-Util is not among them: it says that some kernel ran, not that the device is well.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Literal, NamedTuple

import msgspec

DeviceKind = Literal["gpu", "mig", "cpu"]

HW_SLOWDOWN, SW_THERMAL, HW_THERMAL, POWER_BRAKE, POWER_CAP = 0x8, 0x20, 0x40, 0x80, 0x4
"""Bits of `throttle`, as NVML numbers them. A power cap at full load is how a GPU is meant to
work; the others are its cooling's or its power supply's failure."""

THROTTLE_NAMES = {
    HW_SLOWDOWN: "hardware slowdown",
    SW_THERMAL: "software thermal slowdown",
    HW_THERMAL: "hardware thermal slowdown",
    POWER_BRAKE: "power brake",
    POWER_CAP: "power cap",
}


class Xid(msgspec.Struct, frozen=True, array_like=True):
    """One error that the driver has reported."""

    code: int
    at_s: float


class DeviceSample(msgspec.Struct, frozen=True, omit_defaults=True):
    """One look at one device. A number that the device does not tell is -1."""

    device: str
    """UUID of a GPU or of a MIG instance."""
    at_s: float
    kind: DeviceKind = "gpu"
    index: int = -1
    name: str = ""
    ranks: tuple[int, ...] = ()
    """Global ranks whose processes, or their children, hold memory on it."""
    xids: tuple[Xid, ...] = ()
    """Of the last minutes, so that a lost heartbeat loses none."""
    ecc_uncorrected: int = -1
    """Since the driver was loaded."""
    ecc_corrected: int = -1
    retired_pages: int = -1
    """For uncorrectable errors (up to Volta); later ones remap rows."""
    remapped_rows: int = -1
    """For uncorrectable errors."""
    remap_pending: bool = False
    """Takes effect with the device's next reset; until then its memory may err again."""
    remap_failed: bool = False
    """No spare rows are left: the device has to be replaced."""
    throttle: int = 0
    """Bits: why its clock is lower than it could be."""
    sm_clock_mhz: int = -1
    sm_clock_max_mhz: int = -1
    power_w: float = -1.0
    power_limit_w: float = -1.0
    temperature_c: int = -1
    memory_bytes: int = -1
    memory_total_bytes: int = -1
    error: str = ""
    """NVML could not ask it, and why; `lost` begins it where the device has left the bus."""


class DeviceMemory(NamedTuple):
    """What is in use on a device, in bytes."""

    used: int
    """Of all processes, the driver's own share among it."""
    held: Mapping[int, int]
    """Pid -> what that process has."""


def count_left_behind(before: DeviceMemory, now: DeviceMemory, dead: Collection[int]) -> int:
    """Return how many bytes that `dead` processes had `before` are in use `now`.

    Whether NVML still lists a dead process says too little: memory that another process has mapped
    stays without it. So what counts is the device's use, less what living processes have and what
    belonged to nobody before. It is never more than what the dead had, whoever else came since.

    >>> before = DeviceMemory(1000, {7: 600, 8: 300})
    >>> count_left_behind(before, DeviceMemory(900, {8: 300}), {7})
    500
    >>> count_left_behind(before, DeviceMemory(2400, {8: 300, 9: 2000}), {7})
    0
    """
    had = sum(size for pid, size in before.held.items() if pid in dead)
    nobodys = before.used - sum(before.held.values())
    living = sum(size for pid, size in now.held.items() if pid not in dead)
    return max(0, min(had, now.used - nobodys - living))


def name_throttle(bits: int) -> str:
    """Return the reasons in `bits` in words.

    >>> name_throttle(0x48)
    'hardware slowdown, hardware thermal slowdown'
    """
    return ", ".join(name for bit, name in THROTTLE_NAMES.items() if bits & bit)


def share_devices(visible: Sequence[str], group: int, groups: int, nproc: int) -> tuple[str, ...]:
    """Return the devices of one of several replica groups of `nproc` ranks on one machine.

    Each has as many as any other, and none that another has, so that LOCAL_RANK, which begins at 0
    in every group, is a device of its own. What cannot be divided is left over. Where there are
    fewer devices than ranks, groups share them in turn.

    >>> share_devices("01234567", 1, 3, 2), share_devices("01", 2, 3, 1)
    (('2', '3'), ('0',))
    """
    if not visible:
        return ()
    each = len(visible) // groups
    if each >= nproc:
        return tuple(visible[group * each : (group + 1) * each])
    first = group * nproc
    return tuple(visible[(first + slot) % len(visible)] for slot in range(min(nproc, len(visible))))
