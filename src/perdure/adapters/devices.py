"""The one door to NVML: which devices there are, and what their counters say.

NVML is asked and never CUDA: a CUDA context would cost memory and break forking. Where the
library, the driver or a single counter is missing, that number is missing and nothing else.
"""

import hashlib
import importlib
import os
import re
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from perdure.adapters.host import read_text
from perdure.model.job import JobSpec
from perdure.model.signals.devices import DeviceMemory, DeviceSample, Xid, share_devices

XID_KEPT_S = 600.0
_XIDS_MAX = 16
_UNIT = {"mW": 1e-3}


def load_nvml() -> Any:
    """Return NVML's Python module, or None where it is not installed."""
    try:
        return importlib.import_module("pynvml")
    except ImportError:
        return None


class Nvml:
    """An open line to NVML; `gpus` are those that CUDA would show, in its order."""

    def __init__(
        self,
        module: Any,
        environ: Mapping[str, str] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Use `module`, which has to be initialized."""
        self._nvml, self._clock = module, clock
        visible = (environ if environ is not None else os.environ).get("CUDA_VISIBLE_DEVICES")
        self.gpus: Sequence[tuple[str, int, str, Any]] = choose_visible(self._list(), visible)
        """(UUID, index, kind, handle)"""
        self._events = self._watch_xids()
        self._xids: dict[str, deque[Xid]] = {}

    @classmethod
    def open(cls, environ: Mapping[str, str] | None = None, visible: str = "") -> "Nvml | None":
        """Return a line to NVML, `visible` devices only where some are named.

        None without library, driver or devices.
        """
        if visible:
            environ = {"CUDA_VISIBLE_DEVICES": visible}
        module = load_nvml()
        if module is None:
            return None
        try:
            module.nvmlInit()
        except module.NVMLError:
            return None
        nvml = cls(module, environ)
        if not nvml.gpus:
            nvml.close()
            return None
        return nvml

    def close(self) -> None:
        """End it."""
        self._ask(lambda: self._nvml.nvmlShutdown())

    @property
    def ids(self) -> tuple[str, ...]:
        """Return the UUIDs."""
        return tuple(uuid for uuid, _, _, _ in self.gpus)

    @property
    def models(self) -> tuple[str, ...]:
        """Return the name of each device, with its driver's version."""
        driver = _text(self._ask(lambda: self._nvml.nvmlSystemGetDriverVersion()))
        names = (_text(self._call("nvmlDeviceGetName", handle)) for *_, handle in self.gpus)
        return tuple(f"{name} (driver {driver})" for name in names)

    def list_used(self) -> frozenset[str]:
        """Return the UUIDs of devices on which a process computes, whoever's it is."""
        name = "nvmlDeviceGetComputeRunningProcesses"
        return frozenset(uuid for uuid, _, _, handle in self.gpus if self._call(name, handle))

    def sample(
        self,
        parents: Callable[[int], Iterable[int]],
        ranks: Mapping[int, int],
        offset_s: float = 0.0,
    ) -> tuple[DeviceSample, ...]:
        """Return a look at each device; `ranks` is rank -> pid, `parents` a pid's ancestors."""
        self._take_xids(offset_s)
        by_pid = {pid: rank for rank, pid in ranks.items()}
        return tuple(self._look(gpu, parents, by_pid, offset_s) for gpu in self.gpus)

    def list_memory(self) -> dict[str, DeviceMemory]:
        """Return what is in use on each device, by process; a device that hides it is left out.

        It is hidden where NVML does not know what one of the processes has (WSL, some containers).
        """
        found = dict[str, DeviceMemory]()
        for uuid, _, _, handle in self.gpus:
            memory = self._call("nvmlDeviceGetMemoryInfo", handle)
            running = self._call("nvmlDeviceGetComputeRunningProcesses", handle)
            if memory is None or running is None:
                continue
            sizes = [(one.pid, getattr(one, "usedGpuMemory", None)) for one in running]
            held = {int(pid): int(size) for pid, size in sizes if size is not None}
            if len(held) == len(sizes):
                found[uuid] = DeviceMemory(int(memory.used), held)
        return found

    def _list(self) -> list[tuple[str, int, str, Any]]:
        nvml, found = self._nvml, list[tuple[str, int, str, Any]]()
        for index in range(self._ask(lambda: nvml.nvmlDeviceGetCount(), 0)):
            handle = self._call("nvmlDeviceGetHandleByIndex", index)
            uuid = _text(self._call("nvmlDeviceGetUUID", handle))
            if handle is None or not uuid:
                continue
            found += self._list_mig(handle, index) or [(uuid, index, "gpu", handle)]
        return found

    def _list_mig(self, handle: Any, index: int) -> list[tuple[str, int, str, Any]]:
        """Return the instances that a GPU is divided into; none where it is whole."""
        nvml = self._nvml
        mode = self._ask(lambda: nvml.nvmlDeviceGetMigMode(handle)[0], 0)
        parts = []
        for i in range(self._ask(lambda: nvml.nvmlDeviceGetMaxMigDeviceCount(handle), 0) * mode):
            part = self._call("nvmlDeviceGetMigDeviceHandleByIndex", handle, i)
            uuid = _text(self._call("nvmlDeviceGetUUID", part)) if part else ""
            if uuid:
                parts.append((uuid, index, "mig", part))
        return parts

    def _watch_xids(self) -> Any:
        """Ask to be told of errors; returns None where that is not possible."""
        nvml = self._nvml
        events = self._ask(lambda: nvml.nvmlEventSetCreate())
        if events is None:
            return None
        for _, index, _, _ in self.gpus:
            handle = self._call("nvmlDeviceGetHandleByIndex", index)
            self._call(
                "nvmlDeviceRegisterEvents", handle, nvml.nvmlEventTypeXidCriticalError, events
            )
        return events

    def _take_xids(self, offset_s: float) -> None:
        nvml = self._nvml
        for _ in range(64 if self._events is not None else 0):
            event = self._ask(lambda: nvml.nvmlEventSetWait_v2(self._events, 0))
            if event is None:  # Nothing has happened: NVML calls that a time-out.
                return
            uuid = _text(self._call("nvmlDeviceGetUUID", event.device))
            kept = self._xids.setdefault(uuid, deque(maxlen=_XIDS_MAX))
            kept.append(Xid(int(event.eventData), self._clock() + offset_s))

    def _look(
        self,
        gpu: tuple[str, int, str, Any],
        parents: Callable[[int], Iterable[int]],
        ranks: Mapping[int, int],
        offset_s: float,
    ) -> DeviceSample:
        uuid, index, kind, handle = gpu
        nvml, ask, now = self._nvml, self._ask, self._clock() + offset_s
        whole = ask(lambda: nvml.nvmlDeviceGetHandleByIndex(index))
        parent = _text(ask(lambda: nvml.nvmlDeviceGetUUID(whole))) or uuid
        xids = tuple(x for x in self._xids.get(parent, ()) if now - x.at_s < XID_KEPT_S)
        memory = ask(lambda: nvml.nvmlDeviceGetMemoryInfo(handle))
        rows = ask(lambda: nvml.nvmlDeviceGetRemappedRows(whole))
        sm = nvml.NVML_CLOCK_SM
        return DeviceSample(
            device=uuid,
            at_s=now,
            kind="mig" if kind == "mig" else "gpu",
            index=index,
            name=_text(ask(lambda: nvml.nvmlDeviceGetName(handle))),
            ranks=self._list_device_ranks(handle, parents, ranks),
            xids=xids,
            ecc_uncorrected=self._count_ecc(whole, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED),
            ecc_corrected=self._count_ecc(whole, nvml.NVML_MEMORY_ERROR_TYPE_CORRECTED),
            retired_pages=self._count_retired(whole),
            remapped_rows=int(rows[1]) if rows else -1,
            remap_pending=bool(rows and rows[2]),
            remap_failed=bool(rows and rows[3]),
            throttle=self._read_throttle(whole),
            sm_clock_mhz=ask(lambda: nvml.nvmlDeviceGetClockInfo(whole, sm), -1),
            sm_clock_max_mhz=ask(lambda: nvml.nvmlDeviceGetMaxClockInfo(whole, sm), -1),
            power_w=ask(lambda: nvml.nvmlDeviceGetPowerUsage(whole) * _UNIT["mW"], -1.0),
            power_limit_w=ask(
                lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(whole) * _UNIT["mW"], -1.0
            ),
            temperature_c=ask(lambda: nvml.nvmlDeviceGetTemperature(whole, 0), -1),
            memory_bytes=int(memory.used) if memory else -1,
            memory_total_bytes=int(memory.total) if memory else -1,
            error=self._explain_error(index),
        )

    def _list_device_ranks(
        self, handle: Any, parents: Callable[[int], Iterable[int]], ranks: Mapping[int, int]
    ) -> tuple[int, ...]:
        """Return the ranks whose processes hold memory on the device."""
        running = self._ask(lambda: self._nvml.nvmlDeviceGetComputeRunningProcesses(handle), ())
        found = set()
        for process in running:
            for pid in (process.pid, *parents(process.pid)):
                if pid in ranks:
                    found.add(ranks[pid])
                    break
        return tuple(sorted(found))

    def _read_throttle(self, handle: Any) -> int:
        """Return the bits of what holds the clock down; the older name goes with CUDA 14."""
        reasons = self._call("nvmlDeviceGetCurrentClocksEventReasons", handle)
        if reasons is None:
            reasons = self._call("nvmlDeviceGetCurrentClocksThrottleReasons", handle)
        return int(reasons or 0)

    def _count_ecc(self, handle: Any, which: int) -> int:
        volatile = self._nvml.NVML_VOLATILE_ECC
        ask = self._nvml.nvmlDeviceGetTotalEccErrors
        return int(self._ask(lambda: ask(handle, which, volatile), -1))

    def _count_retired(self, handle: Any) -> int:
        nvml = self._nvml
        cause = nvml.NVML_PAGE_RETIREMENT_CAUSE_DOUBLE_BIT_ECC_ERROR
        pages = self._ask(lambda: nvml.nvmlDeviceGetRetiredPages(handle, cause))
        return len(pages) if pages is not None else -1

    def _explain_error(self, index: int) -> str:
        """Return why the device cannot be asked; `lost` first where it has left the bus."""
        nvml = self._nvml
        try:
            nvml.nvmlDeviceGetUUID(nvml.nvmlDeviceGetHandleByIndex(index))
        except nvml.NVMLError as error:
            lost = getattr(error, "value", None) == nvml.NVML_ERROR_GPU_IS_LOST
            return f"lost: {error}" if lost else str(error)
        return ""

    def _call(self, name: str, *args: Any) -> Any:
        return self._ask(lambda: getattr(self._nvml, name)(*args))

    def _ask(self, question: Callable[[], Any], default: Any = None) -> Any:
        try:
            return question()
        except (self._nvml.NVMLError, AttributeError):
            return default


Gpu = TypeVar("Gpu", bound=tuple[Any, ...])


def choose_visible(gpus: Sequence[Gpu], visible: str | None) -> Sequence[Gpu]:
    """Return what CUDA_VISIBLE_DEVICES leaves, in its order: by index, or by (part of) UUID.

    A GPU begins with these two: UUID, index.
    """
    if visible is None:
        return gpus
    chosen: list[Gpu] = []
    for word in (part.strip() for part in visible.split(",")):
        match = [g for g in gpus if (str(g[1]) == word or (word and g[0].startswith(word)))]
        if not match:  # CUDA ignores everything after the first unknown device.
            break
        chosen.append(match[0])
    return chosen


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value or "")


def list_gpus(environ: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """Return the UUIDs of the GPUs or MIG instances that CUDA would show; often none."""
    nvml = Nvml.open(environ)
    if nvml is None:
        return ()
    try:
        return nvml.ids
    finally:
        nvml.close()


def list_device_ids(
    spec: JobSpec, node: int, gpus: tuple[str, ...] | None = None
) -> tuple[str, ...]:
    """Return a stable id for each slot of `node`: a GPU's UUID, or a synthetic one for CPU.

    More slots than GPUs share them in turn; nodes that share this machine go on where the one
    before them ends. What a script really uses, NVML tells later (`DeviceSample.ranks`).
    """
    found = list_gpus() if gpus is None else gpus
    first, machine = node * spec.nproc, read_machine_id()
    return tuple(
        found[(first + slot) % len(found)] if found else f"cpu-{machine}-{node}-{slot}"
        for slot in range(spec.nproc)
    )


def choose_group_devices(spec: JobSpec, node: int, environ: Mapping[str, str]) -> str:
    """Return CUDA_VISIBLE_DEVICES of the replica group on `node`; empty where nothing is divided.

    All groups of a torchft job are on one machine. What the environment, or the job's own, says
    already is what they divide; otherwise every GPU of the machine, by CUDA's own numbers.
    """
    if not spec.groups:
        return ""
    merged = {**environ, **spec.env}
    given = merged.get("CUDA_VISIBLE_DEVICES")
    found = list_gpus(merged)
    if given is None and any(one.startswith("MIG-") for one in found):
        words = list(found)  # Instances have no numbers.
    elif given is None:
        words = [str(index) for index in range(len(found) or len(_list_nodes()))]
    else:
        words = [word.strip() for word in given.split(",") if word.strip()]
        words = words[: len(found)] if found else words
    return ",".join(share_devices(words, node, spec.groups, spec.nproc))


def _list_nodes(folder: str = "/dev") -> list[str]:
    """Return the device files of NVIDIA GPUs, for a machine without NVML's library."""
    try:
        return [name for name in os.listdir(folder) if re.fullmatch(r"nvidia\d+", name)]
    except OSError:
        return []


def read_machine_id() -> str:
    """Return eight digits that stay the same for this machine, through reboots where it can."""
    paths = ("/etc/machine-id", "/var/lib/dbus/machine-id", "/proc/sys/kernel/random/boot_id")
    text = next((text for path in paths if (text := read_text(path).strip())), "")
    # Containers made of one image have its machine id in common, and only their names differ.
    return hashlib.sha256(f"{text}@{os.uname().nodename}".encode()).hexdigest()[:8]
