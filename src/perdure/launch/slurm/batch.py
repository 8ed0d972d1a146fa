"""The program of the batch script: one run of the chain that makes up a job.

    python -m perdure.launch.slurm.batch PLACE WARNED

It starts `perdure run`, stops it at an agreed step when Slurm warns (USR1) or ends the job (TERM),
and decides what follows. Only after a warning is the job put back into the queue, under the same
id; a preempted or lost one Slurm puts back itself, and a cancelled one stays out. Each run leaves a
line in PLACE/runs.jsonl, so that a chain that gets nowhere is ended and not repeated for ever.
"""

import contextlib
import fcntl
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from perdure.launch.runs import (
    RUNS,
    Run,
    append_run,
    decide,
    follow,
    hear,
    locate_own_job,
    look_at_job,
    read_runs,
    read_status,
    say,
)
from perdure.launch.slurm.containers import Container
from perdure.launch.slurm.size import Size, count_given
from perdure.model.errors import PlatformError
from perdure.model.job import JobSpec
from perdure.model.paths import JobPaths

WORDS = {int(signal.SIGUSR1): "the walltime is near", int(signal.SIGTERM): "Slurm ends the job"}
_CALL_S = 60.0
_PREDECESSOR_S = 180.0


class Chain(msgspec.Struct, frozen=True, kw_only=True):
    """What this program is told: `chain.json` beside the job's document."""

    requeue_max: int
    cpus: int
    gres: str
    container: Container = Container()

    def list_step_words(self) -> list[str]:
        """Return the command line of a step of one task on one node, with all that it has."""
        gres = [f"--gres={self.gres}"] if self.gres else []
        return ["srun", "--nodes=1", "--ntasks=1", "--overlap", f"--cpus-per-task={self.cpus}",
                "--kill-on-bad-exit=0", *gres]  # fmt: skip


def main(place: str, warned: str) -> int:
    """Be one run; return the exit code of the batch script."""
    began_s = time.time()
    folder = Path(place)
    chain = msgspec.json.decode((folder / "chain.json").read_bytes(), type=Chain)
    spec = msgspec.json.decode((folder / "job.json").read_bytes(), type=JobSpec)
    job, task = os.environ["SLURM_JOB_ID"], os.environ.get("SLURM_ARRAY_TASK_ID", "")
    name = f"{spec.name}-{task}" if task else spec.name
    told = hear(signal.SIGUSR1, signal.SIGTERM)
    if os.path.exists(warned):  # Before our handler stood.
        told.append(signal.SIGUSR1)
    restart = int(os.environ.get("SLURM_RESTART_COUNT", "0") or 0)
    records = folder / (f"runs-{task}.jsonl" if task else RUNS)
    before, size = read_runs(records), Size(spec, count_given(spec, os.environ))
    if wanted := size.find_wanted(before):
        say(f"a world of a fixed size waits for {wanted} nodes, and Slurm gave {size.nodes}")
        return requeue(job, wanted) if restart < chain.requeue_max else 1
    document, spec = size.write(folder, job)
    notice = folder / f"notice-{job}-{restart}"
    command = [sys.executable, "-P", "-m", "perdure", "run", "-c", str(document)]
    command += ["--name", name, *place_nodes(spec, folder, chain, notice)]
    say(f"run {restart} of job {job} ({name}) on {os.environ.get('SLURM_JOB_NODELIST', '?')}")
    paths = locate_own_job(name)
    wait_for_predecessor(paths)
    process = subprocess.Popen(command)
    leaves = spec.unordered.leaves
    look = heed(notice, process, told) if leaves else (lambda: None)
    code = follow(process, told, WORDS, look, leaves=leaves)
    state, checkpoint = look_at_job(paths)
    run = Run(
        job=job, restart=restart, state=state, code=code, checkpoint=checkpoint,
        warned=signal.SIGUSR1 in told, ended_by="TERM" if signal.SIGTERM in told else "",
        started_s=began_s, ended_s=time.time(), nodes=size.nodes,
        fixed=bool((status := read_status(paths)) and status.fixed),
    )  # fmt: skip
    append_run(records, run)
    what, why = decide(run, before, chain.requeue_max)
    say(f"{what}: {why}")
    if what == "requeue":
        return requeue(job, size.find_fixed([run]))
    return 1 if what == "give up" else code


def heed(notice: Path, process: "subprocess.Popen[bytes]", told: list[int]) -> Callable[[], None]:
    """Return what has the job save, once, when the steps' tasks have heard of a TERM.

    They make the file `notice`. That may be long before this script hears of it, and who leaves by
    then is not put back by Slurm: it is only a reason to save.
    """
    waited = [notice]

    def look() -> None:
        if waited and not told and notice.exists():
            waited.clear()
            say("Slurm is about to end the job: a checkpoint")
            process.send_signal(signal.SIGUSR1)

    return look


def wait_for_predecessor(paths: JobPaths) -> None:
    """Wait until the run before is gone, for a while.

    A node that Slurm has given up may live: its run, or the file server for it, holds the job.
    """
    deadline = time.monotonic() + _PREDECESSOR_S
    with contextlib.suppress(OSError), open(paths.lock, "rb") as lock:
        while time.monotonic() < deadline:
            try:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                time.sleep(1.0)


def requeue(job: str, nodes: int = 0) -> int:
    """Put this job back into the queue, under its own id; return 0 once it is.

    With `nodes` it waits there for exactly so many. A preempted job is back already: then Slurm
    says that it is pending, and all is well. Where this succeeds, Slurm ends this very program;
    leaving at once spares the wait until KillWait.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    for attempt in range(5):
        try:
            done = subprocess.run(
                ["scontrol", "requeue", job], capture_output=True, text=True, timeout=_CALL_S
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            say(f"scontrol requeue: {error}")
        else:
            if done.returncode == 0 or "pending" in done.stderr:
                return pin(job, nodes) if nodes else 0
            say(f"scontrol requeue: {done.stderr.strip()}")
        time.sleep(2.0**attempt)
    say("cannot be put back; `perdure launch` with the same name goes on from the checkpoint")
    return 75


def pin(job: str, nodes: int) -> int:
    """Have a job that was put back wait for exactly so many nodes; return 0.

    Where that cannot be said, its next run finds out, and puts it back again.
    """
    words = ["scontrol", "update", f"jobid={job}", f"NumNodes={nodes}-{nodes}"]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=_CALL_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        say(f"scontrol update: {error}")
    else:
        if done.returncode:
            say(f"scontrol update: {done.stderr.strip()}")
    return 0


def place_nodes(spec: JobSpec, folder: Path, chain: Chain, notice: Path) -> list[str]:
    """Return the option of `perdure run` that puts an agent on each node of the allocation."""
    several, container = spec.num_nodes > 1 and not spec.groups, chain.container
    if not (several or container.python):
        return []
    options, words = container.expand()
    words += [container.python or sys.executable, "-P", "-m", "perdure.launch.slurm.node"]
    words.append(str(notice))
    if several or options:
        words = [*chain.list_step_words(), "--input=none", "--relative={node}", *options, *words]
    document: dict[str, object] = {"command": words}
    if several:
        addresses = resolve_addresses(list_hosts())
        here = all(is_loopback(address) for address in addresses)
        document |= {"bind": "127.0.0.1", "addresses": []} if here else {
            "bind": addresses[0], "addresses": addresses,
        }  # fmt: skip
    path = folder / f"placement-{os.environ['SLURM_JOB_ID']}.json"
    path.write_bytes(msgspec.json.encode(document))
    return ["--placement", str(path)]


def list_hosts() -> list[str]:
    """Return the nodes of the allocation."""
    words = ["scontrol", "show", "hostnames", os.environ["SLURM_JOB_NODELIST"]]
    return subprocess.run(
        words, capture_output=True, text=True, timeout=_CALL_S, check=True
    ).stdout.split()


def resolve_addresses(hosts: Sequence[str]) -> list[str]:
    """Return the addresses at which the nodes of an allocation reach one another.

    Where all are loopback, all are on this machine (a cluster of tests).

    Raises:
        PlatformError: a node has none that the others could use.
    """
    found = {host: resolve_address(host) for host in dict.fromkeys(hosts)}
    outside = [address for address in found.values() if not is_loopback(address)]
    for host, address in found.items():
        if outside and is_loopback(address) and is_here(host):
            found[host] = read_route_address(outside[0])
    lost = next((host for host in found if outside and is_loopback(found[host])), "")
    if lost or "" in found.values():
        host = lost or next(host for host, address in found.items() if not address)
        raise PlatformError(
            f"node {host} has no address for the others: its name is {found[host] or 'unknown'}",
            hint=f"scontrol show node {host}: NodeAddr; or the name's line in /etc/hosts",
        )
    return [found[host] for host in hosts]


def resolve_address(host: str) -> str:
    """Return the address of a node, as Slurm reaches it; a loopback one where there is no other.

    On Debian and Ubuntu a machine's own name is 127.0.1.1 to itself.
    """
    answers = resolve(host)
    if not answers or all(is_loopback(answer) for answer in answers):
        done = subprocess.run(
            ["scontrol", "-o", "show", "node", host],
            capture_output=True,
            text=True,
            timeout=_CALL_S,
            check=False,
        )
        fields = dict(word.partition("=")[::2] for word in done.stdout.split() if "=" in word)
        answers += resolve(fields.get("NodeAddr", ""))
    return min(answers, key=is_loopback, default="")


def resolve(name: str) -> list[str]:
    """Return the IPv4 addresses of a name, in the resolver's order; none where it knows none."""
    try:
        rows = socket.getaddrinfo(name, None, socket.AF_INET, socket.SOCK_STREAM) if name else []
    except (OSError, UnicodeError):
        return []
    return [str(row[4][0]) for row in rows]


def read_route_address(other: str) -> str:
    """Return this machine's address on its way to `other`; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        try:
            asking.connect((other, 9))
        except OSError:
            return ""
        return str(asking.getsockname()[0])


def is_here(host: str) -> bool:
    """Return whether a node is the one that runs this."""
    names = {os.environ.get("SLURMD_NODENAME", ""), socket.gethostname()}
    return host in names or host in {name.partition(".")[0] for name in names}


def is_loopback(address: str) -> bool:
    """Return whether an IPv4 address is a machine's own."""
    return address.startswith("127.")


if __name__ == "__main__":
    try:
        sys.exit(main(*sys.argv[1:3]))
    except PlatformError as error:
        say(f"error: {error}; {error.hint}")
        sys.exit(error.exit_code)
