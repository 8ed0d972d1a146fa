"""One look at a machine and a project, for the checks of `perdure doctor`; nothing is changed.

Every part may fail alone: what cannot be read is left empty, and no check then speaks of it.
"""

import contextlib
import os
import platform
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

from perdure.adapters.devices import Nvml, load_nvml
from perdure.adapters.health import find_filesystem, read_installed
from perdure.adapters.host import list_cgroups, list_parents
from perdure.model.platforms.box import BoxFacts, Disk, Gpu

T = TypeVar("T")

VARIABLES = (
    "CUDA_VISIBLE_DEVICES",
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_ALLOC_CONF",
    "TMPDIR",
)
SCRIPTS = (".sh", ".bash", ".slurm", ".sbatch")
SKIPPED = frozenset({".git", ".venv", "__pycache__", "node_modules", ".mypy_cache"})
FILES_MAX = 100_000
_SCAN_S = 3.0
_TIMEOUT_S, _END_TIMEOUT_S = 5.0, 2.0


def read_box(home: str, project: str, checkpoints: str = "") -> BoxFacts:
    """Return the facts of this machine, for jobs under `home` whose code is in `project`."""
    places = {"state": home, "project": project, "temporary": "/tmp", "shared memory": "/dev/shm"}
    if checkpoints and "://" not in checkpoints:
        places["checkpoints"] = checkpoints
    gpus, driver = _try(read_gpus, ((), ""))
    limit, used, kills = _try(read_memory, (0, 0, None))
    torch, cuda = _try(read_torch, ("", ""))
    parents: dict[int, int] = _try(list_parents, {})
    return BoxFacts(
        system=platform.system(),
        disks=tuple(disk for role, path in places.items() if (disk := read_disk(role, path))),
        memory_limit=limit,
        memory_used=used,
        oom_kills=kills,
        env={name: os.environ[name] for name in VARIABLES if name in os.environ},
        open_files=_try(read_open_files, 0),
        rsync=shutil.which("rsync") is not None,
        ancestors=_try(lambda: read_ancestors(parents), ()),
        gpus=gpus,
        gpu_nodes=sum(path.name[6:].isdigit() for path in Path("/dev").glob("nvidia[0-9]*")),
        driver_cuda=driver,
        nvswitch=any(Path("/dev").glob("nvidia-nvswitch[0-9]*")),
        fabric_manager=any(_name(pid).startswith("nv-fabricmanage") for pid in parents),
        torch=torch,
        torch_cuda=cuda,
        crlf=_try(lambda: scan_project(project), ()),
        slurm=_try(read_slurm, {}),
    )


def _try(read: Callable[[], T], default: Any) -> T:
    try:
        return read()
    except (OSError, ValueError, IndexError, KeyError, subprocess.SubprocessError):
        found: T = default
        return found


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
    )


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


def read_gpus() -> tuple[tuple[Gpu, ...], str]:
    """Return the GPUs by NVML, and the newest CUDA that the driver runs."""
    nvml = load_nvml()
    if nvml is None:
        return (), ""
    try:
        nvml.nvmlInit()
        try:
            divided = {i for _, i, kind, _ in Nvml(nvml, {}).gpus if kind == "mig"}
            count = nvml.nvmlDeviceGetCount()
            found = tuple(_read_gpu(nvml, i, divided=i in divided) for i in range(count))
            number = nvml.nvmlSystemGetCudaDriverVersion()
        finally:
            nvml.nvmlShutdown()
    except nvml.NVMLError:
        return (), ""
    return found, f"{number // 1000}.{number % 1000 // 10}"


def _read_gpu(nvml: Any, index: int, *, divided: bool) -> Gpu:
    """Return a GPU; of one that is divided, not everybody may ask what is on all of it."""
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    uuid = nvml.nvmlDeviceGetUUID(handle)
    return Gpu(
        uuid=uuid if isinstance(uuid, str) else uuid.decode(),
        pids=()
        if divided
        else tuple(int(p.pid) for p in nvml.nvmlDeviceGetComputeRunningProcesses(handle)),
    )


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


def scan_project(project: str) -> tuple[str, ...]:
    """Return the scripts with line ends of Windows, of as many files as are looked at in time."""
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
    return tuple(sorted(bad))


def has_windows_lines(path: str) -> bool:
    """Return whether a file's first lines end with CRLF."""
    try:
        with open(path, "rb") as file:
            return b"\r\n" in file.read(65536)
    except OSError:
        return False


def read_slurm() -> dict[str, str]:
    """Return what `scontrol show config` tells; empty where there is no Slurm."""
    if shutil.which("scontrol") is None:
        return {}
    done = subprocess.run(
        ["scontrol", "show", "config"], capture_output=True, text=True, timeout=_TIMEOUT_S
    )
    rows = [line.partition("=") for line in done.stdout.splitlines() if " = " in line]
    return {name.strip(): value.strip() for name, _, value in rows}


def read_slurm_end(job: str) -> float:
    """Return when Slurm ends a job that runs (Unix time).

    Raises:
        ValueError: it does not run, or has no end.
        OSError, SubprocessError: Slurm does not say.
    """
    env = {**os.environ, "TZ": "UTC"}
    env.pop("SLURM_TIME_FORMAT", None)
    done = subprocess.run(
        ["scontrol", "-o", "show", "job", job], env=env, capture_output=True, text=True,
        timeout=_END_TIMEOUT_S,
    )  # fmt: skip
    told = dict(word.partition("=")[::2] for word in done.stdout.split() if "=" in word)
    if told.get("JobState") != "RUNNING":
        raise ValueError(f"job {job} does not run")
    return datetime.fromisoformat(told.get("EndTime", "")).replace(tzinfo=UTC).timestamp()
