"""A real Slurm on this machine: munged, slurmctld and several slurmd as ordinary processes.

All state is in one directory, all ports are its own, and nothing of it outlives `stop`.
"""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from secrets import token_hex

from tests.platforms.slurm_accounting import NEEDED as ACCOUNTING
from tests.platforms.slurm_accounting import find_lines, start_accounting

NEEDED = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol")
_CONF = """\
ClusterName=perdure
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={root}/munge.sock,cred_expire=10
CredType=cred/munge
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldPort={port}
MpiDefault=none
ProctrackType=proctrack/{track}
TaskPlugin=task/{task}
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
SchedulerType=sched/backfill
SchedulerParameters=sched_min_interval=0,batch_sched_delay=0,sched_interval=2,bf_interval=2
JobAcctGatherType=jobacct_gather/{gather}
JobRequeue=1
KillWait=30
MinJobAge=300
ReturnToService=2
SlurmctldTimeout=30
SlurmdTimeout=10
Waittime=0
InactiveLimit=0
PropagateResourceLimits=NONE
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool/%n
SlurmctldPidFile={root}/slurmctld.pid
SlurmdPidFile={root}/slurmd-%n.pid
SlurmctldLogFile={root}/log/slurmctld.log
SlurmdLogFile={root}/log/slurmd-%n.log
GresTypes=gpu
SlurmdParameters=config_overrides
"""
_CGROUP = """\
CgroupPlugin=cgroup/v1
CgroupMountpoint=/sys/fs/cgroup
CgroupAutomount=no
ConstrainRAMSpace=yes
ConstrainSwapSpace=no
ConstrainCores=no
ConstrainDevices=no
AllowedRAMSpace=100
"""


def find_lack(*, accounting: bool = False) -> str:
    """Return why no Slurm can be started here; empty where one can."""
    if os.geteuid() != 0:
        return "not root"
    path = os.environ.get("PATH", "") + ":/usr/sbin"
    needed = (*NEEDED, *(ACCOUNTING if accounting else ()))
    missing = [name for name in needed if shutil.which(name, path=path) is None]
    return f"no {missing[0]}: scripts/setup_platforms.sh" if missing else ""


def pick_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


class Cluster:
    """A cluster of `nodes` nodes of four cores and two devices each; started by `start`.

    With `accounting` slurmdbd and a MariaDB of its own keep what `sacct` tells.
    """

    def __init__(self, root: Path, nodes: int = 2, *, accounting: bool = False) -> None:
        self.root = root
        self.accounting = accounting
        # Names go into the machine's cgroups, where another cluster may have jobs of the same ids.
        mark = f"c{token_hex(3)}n"
        self.nodes = [f"{mark}{number}" for number in range(1, nodes + 1)]
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self._mark = f"SLURM_CONF={root}/".encode()
        """In the environment of everything that this cluster starts."""
        self.cgroups = Path("/sys/fs/cgroup/memory").is_dir()
        self.env = {
            "SLURM_CONF": str(root / "slurm.conf"),
            "PATH": os.environ["PATH"] + ":/usr/sbin",
        }

    def start(self) -> None:
        for name in ("log", "state", "dev", *(f"spool/{node}" for node in self.nodes)):
            (self.root / name).mkdir(parents=True, exist_ok=True)
        self.root.chmod(0o755)  # munge looks at every folder above its socket.
        key = self.root / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        port = self._write_config()
        self._spawn(
            "munged", "munged", "--foreground", "--force", f"--key-file={key}",
            f"--socket={self.root}/munge.sock", f"--pid-file={self.root}/munged.pid",
            f"--log-file={self.root}/log/munged.log", f"--seed-file={self.root}/munge.seed",
        )  # fmt: skip
        self.wait(lambda: (self.root / "munge.sock").exists(), "munge's socket")
        if self.accounting:
            start_accounting(self.root, port, self._spawn, self.wait)
        self._spawn("slurmctld", "slurmctld", "-D", "-c", "-f", str(self.root / "slurm.conf"))
        for node in self.nodes:
            self.start_node(node)
        self.wait(
            lambda: (
                self.call("sinfo", "-h", "-N", "-o", "%T").split()
                and set(self.call("sinfo", "-h", "-N", "-o", "%T").split()) == {"idle"}
            ),
            "idle nodes",
        )

    def _write_config(self) -> int:
        """Write the files of the configuration; return the port of the accounting."""
        host = socket.gethostname().split(".")[0]
        port, accounts, *ports = pick_ports(2 + len(self.nodes))
        track, task = ("cgroup", "cgroup") if self.cgroups else ("linuxproc", "none")
        gather = ("cgroup" if self.cgroups else "linux") if self.accounting else "none"
        text = _CONF.format(
            root=self.root, host=host, port=port, track=track, task=task, gather=gather
        )
        if self.accounting:
            text += find_lines(self.root, accounts)
        else:
            text += "AccountingStorageType=accounting_storage/none\n"
        for node, own in zip(self.nodes, ports, strict=True):
            text += (
                f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={own} CPUs=4 "
                f"RealMemory=4000 Gres=gpu:a100:2 State=UNKNOWN\n"
            )
        names = ",".join(self.nodes)
        text += (
            f"PartitionName=gpu Nodes={names} Default=YES MaxTime=INFINITE State=UP "
            "PriorityTier=10 GraceTime=3 PreemptMode=REQUEUE\n"
            f"PartitionName=urgent Nodes={names} MaxTime=INFINITE State=UP PriorityTier=20 "
            "PreemptMode=OFF\n"
        )
        (self.root / "slurm.conf").write_text(text)
        (self.root / "cgroup.conf").write_text(_CGROUP)
        for number in range(2):
            device = self.root / "dev" / f"nvidia{number}"
            if not device.exists():
                os.mknod(device, 0o20666, os.makedev(195, number))
        (self.root / "gres.conf").write_text(
            f"NodeName={names} Name=gpu Type=a100 File={self.root}/dev/nvidia[0-1]\n"
        )
        return accounts

    def start_node(self, node: str) -> None:
        self._spawn(node, "slurmd", "-D", "-N", node, "-f", str(self.root / "slurm.conf"))

    def lose_node(self, node: str) -> None:
        """Kill a node at once: its daemon, those of the steps there, and what they had started."""
        process = self.processes.pop(node)
        process.kill()
        process.wait()
        # The steps' daemons first: they would tell of the others' end. Each writes its node's log.
        log = str(self.root / "log" / f"slurmd-{node}.log")
        self._kill(lambda folder, env: self._mark in env and log in list_files(folder))
        self._kill(lambda folder, env: f"SLURMD_NODENAME={node}\0".encode() in env)

    def _spawn(self, name: str, *command: str) -> None:
        with open(self.root / "log" / f"{name}.out", "ab") as output:
            # Where pytest is killed, nobody is left to stop them.
            self.processes[name] = subprocess.Popen(
                ("setpriv", "--pdeathsig", "TERM", *command),
                stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                env={**os.environ, **self.env}, start_new_session=True,
            )  # fmt: skip

    def call(self, *words: str, check: bool = True, timeout_s: float = 30.0) -> str:
        done = subprocess.run(
            words, env={**os.environ, **self.env}, capture_output=True, text=True,
            timeout=timeout_s,
        )  # fmt: skip
        assert not check or done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
        return done.stdout

    def job(self, job: str) -> dict[str, str]:
        """Return what `scontrol show job` says of a job."""
        text = self.call("scontrol", "-o", "show", "job", job)
        return dict(word.partition("=")[::2] for word in text.split() if "=" in word)

    def start_now(self, job: str) -> None:
        """Let a job that was put back start at once: Slurm makes it wait for its credential.

        Those of the run before are revoked by the second: one of the same second is refused.
        """
        time.sleep(2.0)
        self.call("scontrol", "update", f"jobid={job}", "StartTime=now", check=False)

    def wait(self, condition: object, what: str, timeout_s: float = 60.0) -> None:
        deadline = time.monotonic() + timeout_s
        assert callable(condition)
        while True:
            try:
                if condition():
                    return
            except (AssertionError, subprocess.TimeoutExpired):
                pass
            if time.monotonic() > deadline:
                logs = "".join(
                    f"--- {path.name}\n{path.read_text(errors='replace')[-1500:]}\n"
                    for path in sorted((self.root / "log").glob("*"))
                )
                raise AssertionError(f"no {what} after {timeout_s:g} s\n{logs}")
            time.sleep(0.1)

    def end_jobs(self) -> None:
        """Kill all jobs, and wait until none is left."""
        with contextlib.suppress(subprocess.TimeoutExpired, AssertionError):
            for job in self.call("squeue", "-h", "-o", "%i", check=False, timeout_s=5).split():
                self.call("scancel", "-s", "KILL", "--full", job, check=False, timeout_s=5)
                self.call("scancel", job, check=False, timeout_s=5)
            self.wait(
                lambda: not self.call("squeue", "-h", check=False, timeout_s=5).strip(),
                "empty queue", 15,
            )  # fmt: skip

    def stop(self) -> None:
        """End everything, jobs first; what they left in cgroups is removed."""
        self.end_jobs()
        for name in [*self.nodes, "slurmctld", "slurmdbd", "mariadbd", "munged"]:
            process = self.processes.pop(name, None)
            if process is not None:
                process.terminate()
                try:
                    process.wait(10)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
        # Daemons of steps outlive their slurmd.
        self._kill(
            lambda folder, env: (
                self._mark in env and b"slurmstepd" in (folder / "cmdline").read_bytes()
            )
        )
        for node in self.nodes:
            folders = list(Path("/sys/fs/cgroup").glob(f"*/slurm_{node}/**/"))
            for folder in sorted(folders, key=lambda path: -len(path.parts)):
                try:
                    folder.rmdir()
                except OSError:
                    continue

    def _kill(self, chosen: Callable[[Path, bytes], bool]) -> None:
        """Kill the processes whose folder in /proc and environment are `chosen`."""
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if chosen(folder, (folder / "environ").read_bytes()):
                    os.kill(int(folder.name), signal.SIGKILL)


def list_files(folder: Path) -> list[str]:
    """Return what a process has open, by its folder in /proc."""
    return [os.readlink(file) for file in (folder / "fd").iterdir()]
