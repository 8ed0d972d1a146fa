"""What was read of a machine before it is trusted with a night's training: facts, no opinion.

`None` or an empty value means that it could not be read; a check then says nothing.
"""

import re

import msgspec

TORCH_MIN, TORCH_END = (2, 9), (2, 14)
"""The first version of torch that perdure is tested with, and the first that it is not."""
TESTED_TORCHES = "2.9 to 2.13"


def read_version(text: str) -> tuple[int, int]:
    """Return the first two numbers of a version; (0, 0) of what is none.

    >>> read_version("2.13.0+cu130"), read_version("nightly")
    ((2, 13), (0, 0))
    """
    match = re.match(r"(\d+)\.(\d+)", text)
    return (int(match[1]), int(match[2])) if match else (0, 0)


NETWORK_KINDS = frozenset(
    {
        *("nfs", "nfs4", "cifs", "smb3", "fuse.sshfs", "9p"),
        *("lustre", "gpfs", "beegfs", "ceph", "glusterfs", "wekafs", "panfs"),
    }
)
"""Types of file systems that lie on other machines."""


class Disk(msgspec.Struct, frozen=True, kw_only=True):
    """A place that a job writes to, and the file system below it."""

    role: str
    """`state`, `project`, `checkpoints`, `temporary` or `shared memory`."""
    path: str
    kind: str = ""
    """Of file system."""
    free: int = 0
    total: int = 0
    inodes_free: int = 0
    inodes: int = 0
    """0 where the file system has no fixed number."""


class Gpu(msgspec.Struct, frozen=True, kw_only=True):
    """A GPU by NVML."""

    uuid: str
    pids: tuple[int, ...] = ()
    """Processes that NVML shows on it."""


class BoxFacts(msgspec.Struct, frozen=True, kw_only=True):
    """One look at a machine, and at the project on it."""

    system: str = "Linux"
    disks: tuple[Disk, ...] = ()
    memory_limit: int = 0
    """Bytes that this process may use: the cgroup's limit or the machine's memory."""
    memory_used: int = 0
    oom_kills: int | None = None
    """Counted by the cgroup since it was made."""
    env: dict[str, str] = {}
    """Of the variables that checks look at."""
    open_files: int = 0
    rsync: bool = False
    """It is on PATH."""
    ancestors: tuple[str, ...] = ()
    """Names of the processes above this one, nearest first."""
    gpus: tuple[Gpu, ...] = ()
    gpu_nodes: int = 0
    """`/dev/nvidiaN`."""
    driver_cuda: str = ""
    """Newest CUDA that the driver runs."""
    nvswitch: bool = False
    fabric_manager: bool = False
    torch: str = ""
    torch_cuda: str = ""
    """CUDA that torch was built with; empty for a build without."""
    crlf: tuple[str, ...] = ()
    """Scripts of the project whose lines end as on Windows."""
    slurm: dict[str, str] = {}
    """Settings that `scontrol show config` tells."""
