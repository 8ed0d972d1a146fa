"""The machine under the ranks: /proc, the boot, the devices. Linux; works as an ordinary user."""

import contextlib
import importlib
import os
import signal
import socket
from pathlib import Path

import psutil

from perdure.model.progress import ProcSample

_TICK_S = 1.0 / os.sysconf("SC_CLK_TCK")


def read_boot_id() -> str:
    """Return the kernel's id of this boot: it tells a reboot from a death."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return "unknown"


def read_host() -> str:
    """Return this machine's name."""
    return socket.gethostname()


def find_devices(node: int, slots: int) -> tuple[str, ...]:
    """Return the ids of the node's devices: GPU UUIDs, or stable names for its CPU slots."""
    with contextlib.suppress(Exception):
        nvml = importlib.import_module("pynvml")
        nvml.nvmlInit()
        count = nvml.nvmlDeviceGetCount()
        found = [nvml.nvmlDeviceGetUUID(nvml.nvmlDeviceGetHandleByIndex(i)) for i in range(count)]
        if found:
            return tuple(str(one) for one in found)
    boot = read_boot_id()[:8]
    return tuple(f"cpu-{boot}-{node}-{slot}" for slot in range(slots))


class ProcSampler:
    """Looks at ranks in /proc, with what their descendants used added in.

    Descendants are searched for only every few looks: a loader's worker shows up a second late,
    and a look costs one small file instead of the whole process table.
    """

    def __init__(self, *, scan_every: int = 4) -> None:
        """Scan for descendants at every `scan_every`-th look at a rank."""
        self._scan_every = scan_every
        self._looks: dict[int, int] = {}
        self._children: dict[int, list[int]] = {}

    def sample(self, pid: int) -> ProcSample:
        """Return one look at `pid`; state X where it is gone."""
        stat = _read_stat(pid)
        if stat is None:
            self._looks.pop(pid, None)
            self._children.pop(pid, None)
            return ProcSample(state="X")
        look = self._looks.get(pid, 0)
        self._looks[pid] = look + 1
        if look % self._scan_every == 0:
            self._children[pid] = _find_children(pid)
        state, cpu_s, threads, rss = stat
        io_bytes = _read_io(pid)
        for child in self._children.get(pid, ()):
            other = _read_stat(child)
            if other is not None:
                cpu_s += other[1]
                rss += other[3]
                io_bytes += _read_io(child)
        return ProcSample(
            state=state, cpu_s=cpu_s, io_bytes=io_bytes, rss_bytes=rss, num_threads=threads
        )


def kill_leftovers(job: str, home: str, node: int) -> int:
    """SIGKILL every process of the job's ranks on `node` that outlived its keeper; return how many.

    They are known by what only perdure puts into an environment.
    """
    wanted = {"PERDURE_JOB": job, "PERDURE_HOME": home, "PERDURE_NODE": str(node)}
    killed = 0
    for process in psutil.process_iter():
        try:
            env = process.environ()
            if "PERDURE_RING" in env and all(env.get(k) == v for k, v in wanted.items()):
                os.kill(process.pid, signal.SIGKILL)
                killed += 1
        except (psutil.Error, OSError):
            continue
    return killed


def _read_stat(pid: int) -> tuple[str, float, int, int] | None:
    """Return (state, CPU seconds, threads, resident bytes) of one process."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            text = file.read()
    except OSError:
        return None
    fields = text[text.rindex(b")") + 2 :].split()
    cpu_s = (int(fields[11]) + int(fields[12])) * _TICK_S
    return fields[0].decode(), cpu_s, int(fields[17]), int(fields[21]) * 4096


def _read_io(pid: int) -> int:
    """Return bytes read and written, page cache and sockets included; 0 where not permitted."""
    try:
        with open(f"/proc/{pid}/io", "rb") as file:
            rows = file.read().split()
    except OSError:
        return 0
    return int(rows[1]) + int(rows[3]) if len(rows) > 3 else 0


def _find_children(pid: int) -> list[int]:
    try:
        return [child.pid for child in psutil.Process(pid).children(recursive=True)]
    except psutil.Error:
        return []
