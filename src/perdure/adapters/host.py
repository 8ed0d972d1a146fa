"""One machine, as /proc and the kernel show it: samples of ranks, leftovers, devices.

Linux only. Files of /proc are kept open from sample to sample: reading an open one costs a
quarter of opening it, and it can never show another process that got the same pid.
"""

import contextlib
import os
import re
import shlex
import signal
import socket
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from msgspec import structs

from perdure.model.signals.progress import ProcSample

_TICK_S = 1.0 / os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")
TREE_S = 5.0
"""How often the whole process table is looked at for descendants of the ranks."""
DELAY_S = 0.5
"""How old what its threads waited for a CPU may be: each of them has a file of its own."""
_GONE = ProcSample(state="X")
_KERNEL_LOG = "/dev/kmsg"
_KERNEL_HEAD = re.compile(r"\d+,\d+,(\d+)[,;]")
_KERNEL_READS_MAX = 1_000_000
"""Reads of the kernel's log; its largest buffer has fewer records."""
_KERNEL_LATE_S = 5.0
_KERNEL_DRIFT = 2e-4
"""The kernel's log is stamped by a clock that no time service slews."""


class ProcStat:
    """`/proc/PID/stat` and `io` of one process, held open, and `schedstat` of its threads."""

    __slots__ = ("_ended_s", "_io", "_stat", "_threads", "pid")

    def __init__(self, pid: int) -> None:
        """Open them.

        Raises:
            OSError: the process is gone.
        """
        self.pid = pid
        self._stat = os.open(f"/proc/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
        self._io = _open(f"/proc/{pid}/io")
        self._threads: dict[int, tuple[int, float]] = {}
        """Descriptor and last value, in seconds."""
        self._ended_s = 0.0

    def sample(self) -> ProcSample:
        """Return one look at it, without descendants; state X once it is gone."""
        try:
            text = os.pread(self._stat, 2048, 0)
        except OSError:
            return _GONE
        words = _split_stat(text)
        if not words:
            return _GONE
        io_bytes = 0
        if self._io >= 0:
            with contextlib.suppress(OSError, ValueError, IndexError):
                lines = os.pread(self._io, 512, 0).split(b"\n", 2)
                io_bytes = int(lines[0].split()[1]) + int(lines[1].split()[1])
        return ProcSample(
            state=words[0].decode(),
            cpu_s=_parse_cpu(words),
            io_bytes=io_bytes,
            rss_bytes=int(words[21]) * _PAGE,
            num_threads=int(words[17]),
            blocked=int(words[0] == b"D"),
        )

    def close(self) -> None:
        """Close them."""
        for fd in (self._stat, self._io, *(fd for fd, _ in self._threads.values())):
            if fd >= 0:
                os.close(fd)
        self._stat = self._io = -1
        self._threads.clear()

    def follow_threads(self) -> None:
        """Follow the threads that there are now."""
        with contextlib.suppress(OSError):
            for name in os.listdir(f"/proc/{self.pid}/task"):
                tid = int(name)
                if tid not in self._threads:
                    self._threads[tid] = (_open(f"/proc/{self.pid}/task/{tid}/schedstat"), 0.0)

    def measure_delay(self) -> float:
        """Return how long its threads were ready and had no CPU, in sum; it never falls."""
        total_s = 0.0
        for tid, (fd, last_s) in list(self._threads.items()):
            try:
                last_s = int(os.pread(fd, 128, 0).split()[1]) / 1e9
                self._threads[tid] = (fd, last_s)
                total_s += last_s
            except (OSError, ValueError, IndexError):
                self._ended_s += last_s
                del self._threads[tid]
                if fd >= 0:
                    os.close(fd)
        return total_s + self._ended_s


def _split_stat(text: bytes) -> list[bytes]:
    """Return the words of `/proc/PID/stat` after the program's name; none where it is gone."""
    words = text[text.rfind(b")") + 2 :].split()
    return words if len(words) >= 22 else []


def _parse_cpu(words: list[bytes]) -> float:
    # Children that were waited for count with their parent, so the sum never falls.
    return sum(int(word) for word in words[11:15]) * _TICK_S


def measure_cpu(pid: int) -> float:
    """Return the CPU seconds of a process and of children that it has waited for."""
    try:
        with open(f"/proc/{pid}/stat", "rb", buffering=0) as file:
            return _parse_cpu(_split_stat(file.read(2048)))
    except OSError:
        return 0.0


class CoreMeter:
    """How busy the cores are that this process may use, from look to look."""

    def __init__(self) -> None:
        """Know nothing before the first look."""
        self._last: tuple[float, float, float] | None = None

    def measure(self, now: float) -> tuple[int, float, float] | None:
        """Return cores, how many of them were busy since the last look, and the pressure.

        None at the first look, and where the kernel does not tell. What a guest uses is counted
        with user time already.
        """
        cores = os.sched_getaffinity(0)
        names = {b"cpu%d" % core for core in cores}
        idle_s, seen = 0.0, 0
        try:
            with open("/proc/stat", "rb") as file:
                rows = [line.split() for line in file if line.startswith(b"cpu")]
            for words in rows:
                if words[0] in names:
                    idle_s += (int(words[4]) + int(words[5])) * _TICK_S
                    seen += 1
        except (OSError, ValueError, IndexError):
            return None
        if seen < len(cores):
            return None
        pressed_s = _read_pressure()
        last, self._last = self._last, (now, idle_s, pressed_s)
        if last is None or now <= last[0]:
            return None
        window_s = now - last[0]
        busy = min(max(seen - (idle_s - last[1]) / window_s, 0.0), float(seen))
        known = pressed_s >= 0.0 and last[2] >= 0.0
        return seen, busy, min((pressed_s - last[2]) / window_s, 1.0) if known else -1.0


_LIMIT_S = 2.0
"""Between two looks at CPU limits."""


class LimitMeter:
    """How often the CPU limits of processes' cgroups have stopped them, from look to look."""

    def __init__(self, root: str = "/sys/fs/cgroup") -> None:
        """Know nothing before the first look; cgroups are mounted below `root`."""
        self._root = root
        self._files: dict[str, tuple[str, ...]] = {}
        """A process's list of cgroups -> the files that count, of those that it is in."""
        self._last: dict[str, tuple[int, int]] = {}
        self._looked_s, self._share = float("-inf"), 0.0

    def measure(self, pids: Iterable[int], now: float) -> float:
        """Return the share of the scheduler's periods in which one was stopped, of the last two s.

        That of the limit which was met most often; 0 where there is none. What is around a cgroup
        counts as well: a pod's limit stops all of its containers.
        """
        if now - self._looked_s >= _LIMIT_S:
            self._looked_s, self._share = now, self._look(pids)
        return self._share

    def _look(self, pids: Iterable[int]) -> float:
        lists = {read_text(path): path for path in (f"/proc/{pid}/cgroup" for pid in pids)}
        self._files = {
            text: self._files[text] if text in self._files else self._find(path)
            for text, path in lists.items()
        }
        counts = {file: _read_periods(file) for files in self._files.values() for file in files}
        last, self._last = self._last, {f: pair for f, pair in counts.items() if pair is not None}
        passed = [(pair, last[file]) for file, pair in self._last.items() if file in last]
        shares = [(m - m0) / (n - n0) for (n, m), (n0, m0) in passed if n > n0 and m > m0]
        return min(max(shares, default=0.0), 1.0)

    def _find(self, own: str) -> tuple[str, ...]:
        folders = [folder for folder, _ in list_cgroups(own, self._root, "cpu")]
        folders = [folder for folder in folders if (folder / "cpu.stat").exists()]
        around = (at for folder in folders for at in (folder, *folder.parents))
        inside = dict.fromkeys(at / "cpu.stat" for at in around if at.is_relative_to(self._root))
        return tuple(str(file) for file in inside if file.exists())


def _read_periods(file: str) -> tuple[int, int] | None:
    """Return how many periods a limit has had, and in how many it stopped somebody."""
    words = dict(line.split()[:2] for line in read_text(file).splitlines() if " " in line)
    try:
        return int(words["nr_periods"]), int(words["nr_throttled"])
    except (KeyError, ValueError):
        return None


def _read_pressure() -> float:
    """Return for how long something has waited for a CPU since boot, in seconds; -1 if unknown."""
    total_us = read_text("/proc/pressure/cpu").partition("\n")[0].rpartition("total=")[2]
    return int(total_us) / 1e6 if total_us.isdigit() else -1.0


def _open(path: str) -> int:
    """Return a descriptor; -1 where it is not permitted, or this kernel has no such accounting."""
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return -1


@dataclass(slots=True)
class _Watched:
    root: ProcStat
    below: dict[int, ProcStat] = field(default_factory=dict)
    newest: ProcSample = _GONE
    taken_s: float = float("-inf")
    delay_s: float = 0.0
    delay_taken_s: float = float("-inf")


class ProcSampler:
    """Samples of ranks with their descendants, at a pace that costs next to nothing."""

    def __init__(self) -> None:
        """Watch nobody yet."""
        self._watched: dict[int, _Watched] = {}
        self._tree_s = float("-inf")

    def watch(self, pids: Iterable[int]) -> None:
        """Watch exactly `pids` from now on."""
        wanted = set(pids)
        for pid in [pid for pid in self._watched if pid not in wanted]:
            watched = self._watched.pop(pid)
            for stat in (watched.root, *watched.below.values()):
                stat.close()
        for pid in sorted(wanted - set(self._watched)):
            with contextlib.suppress(OSError):
                self._watched[pid] = _Watched(ProcStat(pid))
                self._tree_s = float("-inf")

    def sample(self, pid: int, now: float, age_s: float = 0.0) -> ProcSample:
        """Return a sample of `pid` that is no older than `age_s`."""
        watched = self._watched.get(pid)
        if watched is None:
            return _GONE
        if now - watched.taken_s <= age_s:
            return watched.newest
        if now - self._tree_s >= TREE_S:
            self._tree_s = now
            self._follow_descendants()
            for other in self._watched.values():
                other.root.follow_threads()
        if now - watched.delay_taken_s >= DELAY_S:
            watched.delay_taken_s, watched.delay_s = now, watched.root.measure_delay()
        look = watched.root.sample()
        if watched.below:
            look = _add_below(look, watched.below)
        watched.taken_s = now
        watched.newest = structs.replace(
            look,
            io_bytes=max(look.io_bytes, watched.newest.io_bytes),
            run_delay_s=watched.delay_s,
        )
        return watched.newest

    def _follow_descendants(self) -> None:
        below = list_descendants(self._watched)
        for root, watched in self._watched.items():
            for pid in below[root] - set(watched.below):
                with contextlib.suppress(OSError):
                    watched.below[pid] = ProcStat(pid)


def _add_below(root: ProcSample, below: dict[int, ProcStat]) -> ProcSample:
    """Return a sample of a process with its descendants; of those that are gone none is left."""
    looks = [root]
    for pid, stat in list(below.items()):
        look = stat.sample()
        if look.state == "X":
            below.pop(pid).close()
        else:
            looks.append(look)
    return ProcSample(
        state=root.state,
        cpu_s=sum(look.cpu_s for look in looks),
        io_bytes=sum(look.io_bytes for look in looks),
        rss_bytes=sum(look.rss_bytes for look in looks),
        num_threads=sum(look.num_threads for look in looks),
        blocked=sum(look.blocked for look in looks),
    )


def read_all(name: str) -> Iterator[tuple[int, bytes]]:
    """Yield pid and `/proc/PID/name` of each process that lets us read it."""
    for pid in os.listdir("/proc"):
        if pid.isdigit():
            with contextlib.suppress(OSError):
                with open(f"/proc/{pid}/{name}", "rb") as file:
                    data = file.read()
                yield int(pid), data


def read_environ(pid: int) -> dict[str, str]:
    """Return the environment that `pid` was started with; empty where it may not be read."""
    try:
        data = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return {}
    pairs = (os.fsdecode(item).partition("=") for item in data.split(b"\0") if item)
    return {name: value for name, _, value in pairs}


class Process(NamedTuple):
    """One line of the process table."""

    pid: int
    parent: int
    session: int
    state: str
    start: int
    """Clock ticks since boot."""

    @property
    def dead(self) -> bool:
        """Whether only its exit status is left."""
        return self.state in "ZXx"


def parse_process(pid: int, text: bytes) -> Process:
    """Return what `/proc/PID/stat` says, whose second field is the program's name in brackets.

    The name may hold brackets and spaces.
    """
    words = text[text.rindex(b")") + 2 :].split()
    return Process(pid, int(words[1]), int(words[3]), words[0].decode(), int(words[19]))


def scan_processes() -> dict[int, Process]:
    """Return every process that can be seen, by pid."""
    return {pid: parse_process(pid, text) for pid, text in read_all("stat") if text}


def read_process(pid: int) -> Process | None:
    """Return process `pid`; None where it is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return parse_process(pid, file.read())
    except (OSError, ValueError):
        return None


def list_parents() -> dict[int, int]:
    """Return pid -> parent's pid of every process."""
    return {pid: process.parent for pid, process in scan_processes().items()}


def list_ancestors(pid: int) -> list[int]:
    """Return the ancestors of a process, nearest first."""
    found: list[int] = []
    while pid > 1 and (process := read_process(pid)):
        pid = process.parent
        found.append(pid)
    return found


def list_children(pid: int) -> set[int]:
    """Return what the main thread of `pid` has started, or taken over, and not waited for.

    What another thread has started is not among it: that thread waits for it.

    Raises:
        OSError: it is gone, or this kernel has no such list (CONFIG_PROC_CHILDREN).
    """
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        return {int(word) for word in file.read().split()}


def list_descendants(roots: Iterable[int]) -> dict[int, set[int]]:
    """Return the descendants of each of `roots`; one that is below two of them is the nearer's."""
    found: dict[int, set[int]] = {root: set() for root in roots}
    parents = list_parents()
    for pid in parents:
        if pid in found:
            continue
        above, path = parents[pid], 0
        while above and above not in found and path < 4096:
            above, path = parents.get(above, 0), path + 1
        if above in found:
            found[above].add(pid)
    return found


def read_start_time(pid: int) -> int:
    """Return the start time of a process in ticks since boot, which tells it from a later one
    with the same pid; 0 if it is gone (or a zombie).
    """  # noqa: D205
    process = read_process(pid)
    return process.start if process and not process.dead else 0


def read_state(pid: int) -> str:
    """Return the state letter of a process, X if it is gone."""
    process = read_process(pid)
    return process.state if process else "X"


def find_marked(marks: Mapping[str, str]) -> dict[int, int]:
    """Return pid -> start time of all living processes whose environment carries `marks`.

    Looks at the environment that each was started with: everything below a keeper has the
    keeper's. The caller itself is left out, and so is who cannot be looked at (other users).
    """
    wanted = {f"{name}={value}".encode() for name, value in marks.items()}
    marked = [pid for pid, data in read_all("environ") if wanted <= set(data.split(b"\0"))]
    starts = {pid: read_start_time(pid) for pid in marked if pid != os.getpid()}
    return {pid: start for pid, start in starts.items() if start}


def send_signal(pid: int, number: int) -> bool:
    """Send a signal if there is such a process; return False if it is another user's."""
    try:
        os.kill(pid, number)
    except PermissionError:
        return False
    except ProcessLookupError:
        pass
    return True


def send_signal_to_group(pid: int, number: int) -> None:
    """Send a signal to the process group that `pid` leads, as far as it is ours."""
    with contextlib.suppress(OSError):
        os.killpg(pid, number)


def has_stopped(pid: int) -> bool:
    """Return whether no thread of a child runs: all of them were stopped, or it is gone."""
    flags = os.WSTOPPED | os.WEXITED | os.WNOHANG | os.WNOWAIT
    try:
        return os.waitid(os.P_PID, pid, flags) is not None
    except ChildProcessError:
        return True


def catches_signal(pid: int, number: int) -> bool:
    """Return whether process `pid` has a handler for signal `number`."""
    for line in read_text(f"/proc/{pid}/status").splitlines():
        name, _, mask = line.partition(":")
        if name == "SigCgt":
            return bool(int(mask, 16) >> (number - 1) & 1)
    return False


def read_command(pid: int) -> str:
    """Return the command of a process, in one line of at most 200 characters."""
    words = read_text(f"/proc/{pid}/cmdline").rstrip("\0").split("\0")
    text = shlex.join(words) if words != [""] else read_text(f"/proc/{pid}/comm").strip()
    return " ".join(text.split())[:200]


def kill_process(pid: int, start: int) -> bool:
    """Kill `pid` if it is still the process that started at `start`; return whether it was."""
    try:
        fd = os.pidfd_open(pid)
    except OSError:
        return False
    try:
        if read_start_time(pid) != start:
            return False
        signal.pidfd_send_signal(fd, signal.SIGKILL)
    except OSError:
        return False
    finally:
        os.close(fd)
    return True


def end_leftovers(
    known: Mapping[int, int], marks: Mapping[str, str], *, timeout_s: float
) -> list[int]:
    """Kill `known` (pid -> start time) and all that carry `marks` until none is left.

    Blocks, for `timeout_s` at most. Returns the pids that were found alive.
    """
    deadline = time.monotonic() + timeout_s
    killed: set[int] = set()
    while True:
        left = find_marked(marks) | {p: s for p, s in known.items() if read_start_time(p) == s}
        if not left or time.monotonic() > deadline:
            return sorted(killed)
        for pid, start in left.items():
            if kill_process(pid, start):
                killed.add(pid)
        time.sleep(0.005)


def pick_free_ports(host: str, count: int) -> list[int]:
    """Return `count` different TCP ports that are free at this moment."""
    # Each stays taken until the last is picked: the kernel may give out a closed one again.
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.create_server((host, 0))) for _ in range(count)]
        return [probe.getsockname()[1] for probe in probes]


# --- what the machine is -----------------------------------------------------------------------


def read_boot_id() -> str:
    """Return the id of this boot; empty where the kernel does not tell."""
    return read_text("/proc/sys/kernel/random/boot_id").strip()


def read_text(path: str | Path) -> str:
    """Return what is in a small file; empty where it cannot be read."""
    try:
        with open(path, errors="replace") as file:
            return file.read()
    except OSError:
        return ""


def read_kernel_kills(since_s: float = 0.0, limit: int = 50) -> tuple[tuple[str, ...], bool]:
    """Return the kernel's newest lines about kills and Xids, and whether its log can be read.

    `since_s` is by the monotonic clock, which the kernel's stamps only follow roughly.
    """
    earliest_s = since_s - _KERNEL_LATE_S - _KERNEL_DRIFT * time.monotonic()
    try:
        fd = os.open(_KERNEL_LOG, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return (), False
    lines: list[str] = []
    readable = False
    try:
        for _ in range(_KERNEL_READS_MAX):
            try:
                text = os.read(fd, 8192).decode("utf-8", "replace")
            except BlockingIOError:
                readable = True
                break
            except BrokenPipeError:
                continue  # Overwritten while it was read: the next one follows.
            except OSError:
                break
            head = _KERNEL_HEAD.match(text)
            if head is None:  # A container may have another file in its place, such as /dev/null.
                break
            if int(head[1]) / 1e6 < earliest_s:
                continue
            if "Killed process" in text or "oom-kill" in text or "NVRM: Xid" in text:
                lines.append(text.partition(";")[2].splitlines()[0])
    finally:
        os.close(fd)
    return tuple(lines[-limit:]), readable


def list_cgroups(own: str, root: str, controller: str) -> Iterator[tuple[Path, tuple[str, ...]]]:
    """Yield where `controller` may account for a process, likeliest first; and its files there.

    `own` is the process's list of cgroups. The files are those of limit, use and kills of memory.
    """
    one = ("memory.limit_in_bytes", "memory.usage_in_bytes", "memory.oom_control")
    two = ("memory.max", "memory.current", "memory.events")
    for number, controllers, path in (line.split(":", 2) for line in read_text(own).splitlines()):
        # Inside a container the path may be the host's, while the mount shows only ours.
        paths = (path.lstrip("/"), "")
        if number != "0" and controller in controllers.split(","):
            yield from (
                (Path(root, name, p), one) for name in (controllers, controller) for p in paths
            )
        elif number == "0":
            yield from ((Path(root, p), two) for p in paths)
