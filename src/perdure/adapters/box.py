"""One look at a machine and a project, for the checks of `perdure doctor`; nothing is changed.

Every part may fail alone: what cannot be read is left empty, and no check then speaks of it.
"""

import contextlib
import ctypes
import os
import platform
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

from perdure.adapters.devices import Nvml, load_nvml
from perdure.adapters.health import find_filesystem, read_installed
from perdure.adapters.host import list_cgroups, list_parents, read_state
from perdure.model.nccl import ELASTIC
from perdure.model.platforms.box import BoxFacts, DeviceHolder, Disk, Gpu, Nic

T = TypeVar("T")

TOOLS = (
    "tmux",
    "setsid",
    "systemd-run",
    "rsync",
    "ssh",
    "nvidia-smi",
    "sbatch",
    "scontrol",
    "kubectl",
    "git",
)
VARIABLES = (
    "CUDA_VISIBLE_DEVICES",
    "CUDA_MPS_PIPE_DIRECTORY",
    "OMP_NUM_THREADS",
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_ALLOC_CONF",
    "NCCL_SOCKET_IFNAME",
    "GLOO_SOCKET_IFNAME",
    "TMPDIR",
    "WANDB_MODE",
    *ELASTIC,
)
SECRETS = ("WANDB_API_KEY", "HF_TOKEN")
LOCKS = (
    "uv.lock",
    "poetry.lock",
    "pdm.lock",
    "pixi.lock",
    "conda-lock.yml",
    "Pipfile.lock",
    "requirements.lock",
    "requirements.txt",
)
CREDENTIALS = (
    ".netrc",
    ".cache/huggingface/token",
    ".kaggle/kaggle.json",
    ".aws/credentials",
    ".perdure-credentials",
)
SCRIPTS = (".sh", ".bash", ".slurm", ".sbatch")
SKIPPED = frozenset({".git", ".venv", "__pycache__", "node_modules", ".mypy_cache"})
FILES_MAX = 100_000
_SCAN_S = 3.0
_TIMEOUT_S = 5.0
_TICK_S = 1.0 / os.sysconf("SC_CLK_TCK")
_TIME_ERROR = 5


def read_box(home: str, project: str, checkpoints: str = "") -> BoxFacts:
    """Return the facts of this machine, for jobs under `home` whose code is in `project`."""
    places = {"state": home, "project": project, "temporary": "/tmp", "shared memory": "/dev/shm"}
    if checkpoints and "://" not in checkpoints:
        places["checkpoints"] = checkpoints
    gpus, driver = _try(read_gpus, ((), ""))
    limit, used, kills = _try(read_memory, (0, 0, None))
    scripts, count = _try(lambda: scan_project(project), ((), 0))
    torch, cuda = _try(read_torch, ("", ""))
    parents: dict[int, int] = _try(list_parents, {})
    return BoxFacts(
        system=platform.system(),
        clock_s=time.time(),
        clock_synced=_try(read_clock, None),
        disks=tuple(disk for role, path in places.items() if (disk := read_disk(role, path))),
        memory_limit=limit,
        memory_used=used,
        oom_kills=kills,
        cpus=len(os.sched_getaffinity(0)),
        cpu_quota=_try(read_cpu_quota, None),
        env=read_environment(os.environ),
        open_files=_try(read_open_files, 0),
        tools=frozenset(tool for tool in TOOLS if shutil.which(tool)),
        ancestors=_try(lambda: read_ancestors(parents), ()),
        kill_user_processes=_try(read_kill_user_processes, None),
        gpus=gpus,
        gpu_nodes=sum(path.name[6:].isdigit() for path in Path("/dev").glob("nvidia[0-9]*")),
        holders=_try(read_holders, ()),
        driver_cuda=driver,
        mps=any(_name(pid).startswith("nvidia-cuda-mps") for pid in parents),
        nvswitch=any(Path("/dev").glob("nvidia-nvswitch[0-9]*")),
        fabric_manager=any(_name(pid).startswith("nv-fabricmanage") for pid in parents),
        torch=torch,
        torch_cuda=cuda,
        packages=frozenset(name for name in ("wandb", "tensorboard") if find_spec(name)),
        nics=_try(read_nics, ()),
        crlf=scripts,
        project_files=count,
        lock_file=next((n for n in LOCKS if os.path.exists(os.path.join(project, n))), ""),
        readable_secrets=tuple(list_readable_secrets(os.path.expanduser("~"))),
        zombies=sum(read_state(pid) == "Z" for pid in parents),
        slurm=_try(read_slurm, {}),
    )


def _try(read: Callable[[], T], default: Any) -> T:
    try:
        return read()
    except (OSError, ValueError, IndexError, KeyError, subprocess.SubprocessError):
        found: T = default
        return found


def read_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that checks look at; of secrets only that they are set."""
    has_netrc = os.path.exists(os.path.expanduser("~/.netrc"))
    return {
        **{name: environ[name] for name in VARIABLES if name in environ},
        **{name: "set" for name in SECRETS if environ.get(name)},
        **({"files": ".netrc"} if has_netrc else {}),
    }


def read_disk(role: str, path: str) -> Disk | None:
    """Return the file system that `path` is on, or its nearest parent that exists."""
    place = os.path.abspath(os.path.expanduser(path))
    while not os.path.isdir(place):
        place = os.path.dirname(place) or "/"
    try:
        stat = os.statvfs(place)
    except OSError:
        return None
    return Disk(
        role=role,
        path=place,
        kind=find_filesystem(place),
        free=stat.f_bavail * stat.f_frsize,
        total=stat.f_blocks * stat.f_frsize,
        inodes_free=stat.f_favail,
        inodes=stat.f_files,
        rotational=_try(lambda: _read_rotational(place), None),
    )


_VIRTUAL = ("vd", "xvd", "nbd", "rbd", "drbd", "loop", "zd")
"""Kernel's names of disks that say `rotational` whatever they lie on."""


def _read_rotational(place: str) -> bool | None:
    """Return whether the disk below `place` turns; None where that is not known.

    A virtual disk calls itself turning, as the kernel's default is. So do a hypervisor's own disks
    behind other names, and a machine with a hypervisor is believed only where it says no.
    """
    device = os.stat(place).st_dev
    base = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}").resolve()
    for folder in (base, base.parent):  # A partition's queue is its disk's.
        with contextlib.suppress(OSError):
            turns = (folder / "queue/rotational").read_text().strip() == "1"
            virtual = folder.name.startswith(_VIRTUAL) or _has_hypervisor()
            return None if turns and virtual else turns
    return None


def _has_hypervisor(cpuinfo: str = "/proc/cpuinfo") -> bool:
    with open(cpuinfo) as file:
        return any(line.startswith("flags") and " hypervisor" in line for line in file)


def read_memory(
    own: str = "/proc/self/cgroup", root: str = "/sys/fs/cgroup"
) -> tuple[int, int, int | None]:
    """Return (limit, used, OOM kills) of the memory cgroup; the machine's where it has no limit."""
    with open("/proc/meminfo") as file:
        info = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in file}
    limit, used = info["MemTotal"], info["MemTotal"] - info["MemAvailable"]
    for folder, names in list_cgroups(own, root, "memory"):
        with contextlib.suppress(OSError, ValueError):
            kills = _read_counter(folder / names[2])
            own_limit = (folder / names[0]).read_text().strip()
            if own_limit.isdigit() and int(own_limit) < limit:
                stat = dict(
                    line.split() for line in (folder / "memory.stat").read_text().splitlines()
                )
                cached = int(stat.get("total_inactive_file", stat.get("inactive_file", 0)))
                limit, used = int(own_limit), int((folder / names[1]).read_text()) - cached
            return limit, used, kills
    return limit, used, None


def _read_counter(path: Path) -> int | None:
    for line in path.read_text().splitlines():
        if line.startswith("oom_kill "):
            return int(line.split()[1])
    return None


def read_cpu_quota(own: str = "/proc/self/cgroup", root: str = "/sys/fs/cgroup") -> float | None:
    """Return the cores that the cgroup grants; None without a quota."""
    for folder, _ in list_cgroups(own, root, "cpu"):
        with contextlib.suppress(OSError, ValueError):
            if (folder / "cpu.max").exists():
                quota, period = (folder / "cpu.max").read_text().split()
                return None if quota == "max" else int(quota) / int(period)
            quota = (folder / "cpu.cfs_quota_us").read_text()
            period = (folder / "cpu.cfs_period_us").read_text()
            return None if int(quota) <= 0 else int(quota) / int(period)
    return None


def read_clock() -> bool | None:
    """Return whether the kernel knows its clock to be synchronized."""
    buffer = ctypes.create_string_buffer(512)  # struct timex, with `modes` 0: only look.
    state = ctypes.CDLL(None, use_errno=True).adjtimex(buffer)
    return None if state < 0 else state != _TIME_ERROR


def read_open_files() -> int:
    """Return how many descriptors a process may have."""
    import resource

    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return 1 << 30 if soft == resource.RLIM_INFINITY else soft


def read_ancestors(parents: Mapping[int, int]) -> tuple[str, ...]:
    """Return the names of the processes above this one, nearest first."""
    pid = os.getppid()
    names: list[str] = []
    while pid > 0 and len(names) < 64:
        names.append(_name(pid))
        pid = parents.get(pid, 0)
    return tuple(names)


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def read_kill_user_processes() -> bool | None:
    """Return whether systemd-logind ends what this user leaves behind; None without it."""
    if not os.path.isdir("/run/systemd/users"):
        return None
    if os.path.exists(f"/var/lib/systemd/linger/{os.environ.get('USER', '')}"):
        return False
    for line in Path("/etc/systemd/logind.conf").read_text().splitlines():
        if line.replace(" ", "").lower().startswith("killuserprocesses="):
            return line.rpartition("=")[2].strip().lower() in ("yes", "true", "1")
    return False


def read_gpus() -> tuple[tuple[Gpu, ...], str]:
    """Return the GPUs by NVML, and the newest CUDA that the driver runs."""
    nvml = load_nvml()
    if nvml is None:
        return (), ""
    try:
        nvml.nvmlInit()
        try:
            parts = [(i, uuid) for uuid, i, kind, _ in Nvml(nvml, {}).gpus if kind == "mig"]
            found = tuple(
                _read_gpu(nvml, i, tuple(uuid for index, uuid in parts if index == i))
                for i in range(nvml.nvmlDeviceGetCount())
            )
            number = nvml.nvmlSystemGetCudaDriverVersion()
        finally:
            nvml.nvmlShutdown()
    except nvml.NVMLError:
        return (), ""
    return found, f"{number // 1000}.{number % 1000 // 10}"


def _read_gpu(nvml: Any, index: int, instances: tuple[str, ...]) -> Gpu:
    """Return a GPU; of one that is divided, not everybody may ask what is on all of it."""
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    name, uuid = nvml.nvmlDeviceGetName(handle), nvml.nvmlDeviceGetUUID(handle)
    return Gpu(
        uuid=uuid if isinstance(uuid, str) else uuid.decode(),
        name=name if isinstance(name, str) else name.decode(),
        used=0 if instances else int(nvml.nvmlDeviceGetMemoryInfo(handle).used),
        pids=()
        if instances
        else tuple(int(p.pid) for p in nvml.nvmlDeviceGetComputeRunningProcesses(handle)),
        instances=instances,
    )


def read_holders(pattern: str = "/dev/nvidia") -> tuple[DeviceHolder, ...]:
    """Return the processes that hold a GPU's device file open, as far as one may look."""
    if not any(Path("/dev").glob("nvidia[0-9]*")):
        return ()
    found = []
    with open("/proc/uptime") as file:
        uptime_s = float(file.read().split()[0])
    for folder in Path("/proc").glob("[0-9]*/fd"):
        with contextlib.suppress(OSError):
            links = {os.readlink(link.path) for link in os.scandir(folder)}
            devices = sorted(
                x for x in links if x.startswith(pattern) and x[len(pattern) :].isdigit()
            )
            if devices:
                pid = int(folder.parent.name)
                words = (folder.parent / "stat").read_text().rpartition(")")[2].split()
                age_s = uptime_s - int(words[19]) * _TICK_S
                found.append(DeviceHolder(pid=pid, name=_name(pid), age_s=age_s, device=devices[0]))
    return tuple(found)


def read_torch() -> tuple[str, str]:
    """Return torch's version and the CUDA it was built with, without importing it."""
    found = read_installed("torch")
    if not found:
        return "", ""
    spec = find_spec("torch")
    text = Path(spec.origin).with_name("version.py").read_text() if spec and spec.origin else ""
    for line in text.splitlines():
        if line.startswith("cuda"):
            value = line.partition("=")[2].strip().strip("'\"")
            return found, "" if value == "None" else value
    return found, ""


def read_nics(root: str = "/sys/class/net") -> tuple[Nic, ...]:
    """Return the interfaces that are up, without loopback and those of containers."""
    found = []
    for folder in sorted(Path(root).iterdir()):
        if folder.name == "lo" or folder.name.startswith(("docker", "veth", "br-", "virbr", "cni")):
            continue
        with contextlib.suppress(OSError, ValueError):
            if (folder / "operstate").read_text().strip() == "up":
                found.append(Nic(name=folder.name, mtu=int((folder / "mtu").read_text())))
    return tuple(found)


def scan_project(project: str) -> tuple[tuple[str, ...], int]:
    """Return the scripts with line ends of Windows, and how many files there are, up to a limit."""
    deadline, count, bad = time.monotonic() + _SCAN_S, 0, []
    for folder, names, files in os.walk(project):
        names[:] = sorted(name for name in names if name not in SKIPPED)
        count += len(files)
        for name in files:
            path = os.path.join(folder, name)
            if name.endswith(SCRIPTS) and has_windows_lines(path):
                bad.append(os.path.relpath(path, project))
        if count >= FILES_MAX or time.monotonic() > deadline:
            break
    return tuple(sorted(bad)), count


def has_windows_lines(path: str) -> bool:
    """Return whether a file's first lines end with CRLF."""
    try:
        with open(path, "rb") as file:
            return b"\r\n" in file.read(65536)
    except OSError:
        return False


def list_readable_secrets(home: str) -> Iterator[str]:
    """Yield the files of credentials under `home` that others may read."""
    for name in CREDENTIALS:
        path = os.path.join(home, name)
        with contextlib.suppress(OSError):
            if os.stat(path).st_mode & 0o077:
                yield path


def read_slurm() -> dict[str, str]:
    """Return what `scontrol show config` tells; empty where there is no Slurm."""
    if shutil.which("scontrol") is None:
        return {}
    done = subprocess.run(
        ["scontrol", "show", "config"], capture_output=True, text=True, timeout=_TIMEOUT_S
    )
    rows = [line.partition("=") for line in done.stdout.splitlines() if " = " in line]
    return {name.strip(): value.strip() for name, _, value in rows}
