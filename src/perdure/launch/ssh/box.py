"""What runs on the box itself, beside the job: sent along as one file, with nothing but Python.

    python3 box.py probe JSON          what the machine is like
    python3 box.py supervise FOLDER    start the job, wait for it, write down how it ended
    python3 box.py state FOLDER        how it is, by what was written down
    python3 box.py end FOLDER          the same, once its supervisor was told to end it
    python3 box.py take JSON           kill all of a job that is here, as if the machine were gone
    python3 box.py listen SECONDS      be reachable for so long, in the background; say where
    python3 box.py reach JSON          which addresses of others can be connected to
    python3 box.py others FOLDER       who else is on this machine
    python3 box.py hold FOLDER         let nothing start here until standard input ends

Only here is told whether a job lives: a connection that breaks, an exit code 255 of ssh and an
empty list of tmux sessions prove nothing. It imports nothing of perdure's.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pwd
import resource
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

ANSWER = "@@perdure-json "
"""Begins the one line of standard output that is the answer: shells may print banners."""
REFUSED = 4
"""Exit code of a supervisor that did not start the job."""
WRITE_S = 3600.0
"""For so long a disk that takes nothing is tried again."""


def main(argv: list[str]) -> int:
    """Run one of the commands above; return the exit code."""
    command, argument = argv
    if command == "supervise":
        return supervise(argument)
    if command == "hold":
        return hold(argument)
    answers: dict[str, Callable[[str], dict[str, Any]]] = {
        "probe": lambda text: probe(json.loads(text)),
        "state": read_job_state,
        "end": tell_end,
        "take": lambda text: take(json.loads(text)),
        "listen": lambda text: listen(float(text)),
        "reach": lambda text: {address: reach(address) for address in json.loads(text)},
        "others": lambda text: {"others": list_others()},
    }
    print(ANSWER + json.dumps(answers[command](argument)))
    return 0


# --- the supervisor, and what it writes down


def supervise(folder: str) -> int:
    """Run the command of `folder`/settings.json to its end; return its code, 128 + N for signal N.

    `start.json` says who runs it since which boot, `exit.json` how it ended. Both are on the disk
    before anything follows from them. Signals are handled before the child exists.
    """
    settings = read(folder, "settings.json") or {}
    lock = take_lock(os.path.join(folder, "supervise.lock"))
    if lock is None:
        print("box: this job runs already", file=sys.stderr)
        return REFUSED
    shared = take_lock(locate_box_lock(), shared=True)
    if shared is None:
        print("box: this machine is just being given back", file=sys.stderr)
        return REFUSED
    before = read(folder, "start.json") or {}
    memory = find_memory_events()
    started = {
        "attempt": int(before.get("attempt", 0)) + 1,
        "boot_id": boot_id(),
        "pid": os.getpid(),
        "pid_start": start_time(os.getpid()),
        "at": time.time(),
        "memory": memory,
        "oom_kills": count_oom_kills(memory),
    }
    write(folder, "start.json", started)
    failpoint("supervise/started")
    try:
        devices, locks = take_devices(settings.get("gpus", 0))
    except LookupError as error:
        return refuse(folder, started, str(error))
    child: list[subprocess.Popen[bytes]] = []

    def forward(number: int, _frame: Any) -> None:
        if child and number != signal.SIGHUP:
            child[0].send_signal(number)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, forward)
    try:
        child.append(start_job(folder, settings, started, devices))
    except (OSError, KeyError, subprocess.SubprocessError) as error:
        return refuse(folder, started, f"`perdure run` cannot be started: {error}")
    code = child[0].wait()
    failpoint("supervise/ended")
    end(folder, started, {"code": max(code, 0), "signal": max(-code, 0)})
    for fd in [lock, shared, *locks]:
        os.close(fd)
    return code if code >= 0 else 128 - code


def start_job(
    folder: str, settings: dict[str, Any], started: dict[str, Any], devices: str
) -> subprocess.Popen[bytes]:
    """Start the command of the settings; it is written down as the attempt `started`.

    Raises:
        OSError, KeyError, subprocess.SubprocessError: it is not started.
    """

    def begin() -> None:
        """Write down that the job runs: it does so itself, before it is anything."""
        failpoint("supervise/forked")
        pid = os.getpid()
        told = {"child": pid, "child_start": start_time(pid), "devices": devices}
        write(folder, "start.json", {**started, **told})

    path = os.path.join(folder, "run.out")
    environment = dict(os.environ, PERDURE_OUTPUT=path)
    if devices:
        environment["CUDA_VISIBLE_DEVICES"] = devices
    with open(path, "ab") as output:
        return subprocess.Popen(
            [os.path.expandvars(word) for word in settings["command"]],
            cwd=os.path.expandvars(settings["cwd"]),
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Else the terminal hangs it up once we are killed.
            preexec_fn=begin,
        )


def refuse(folder: str, started: dict[str, Any], why: str) -> int:
    """Write down that the attempt `started` was not begun, and why; return the exit code."""
    end(folder, started, {"code": REFUSED, "refused": why})
    print(f"box: {why}", file=sys.stderr)
    return REFUSED


def end(folder: str, started: dict[str, Any], how: dict[str, Any]) -> None:
    """Write down how the attempt `started` ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    spent = {"cpu_s": used.ru_utime + used.ru_stime, "max_rss_bytes": used.ru_maxrss * 1024}
    told = {"attempt": started["attempt"], "boot_id": boot_id(), "at": time.time(), **spent, **how}
    told["oom_kills"] = count_oom_kills(started["memory"]) - started["oom_kills"]
    deadline_s, said = time.monotonic() + WRITE_S, False
    while True:  # Nobody else knows how it ended, and a disk may be full for a while.
        try:
            write(folder, "exit.json", told)
            break
        except OSError as error:
            if time.monotonic() > deadline_s:
                raise
            if not said:
                print(f"box: how it ended cannot be written down yet: {error}", file=sys.stderr)
            said = True
            time.sleep(1.0)
    failpoint("supervise/recorded")


def read_job_state(folder: str) -> dict[str, Any]:
    """Return how the job of `folder` is: what was written down, and who of it still lives."""
    start, exited = read(folder, "start.json"), read(folder, "exit.json")
    now = {"boot_id": boot_id(), "now": time.time(), "load": os.getloadavg()[2]}
    if not start:
        return {**now, "state": "not-started", "reason": "its supervisor has written nothing yet"}
    told = {**now, "attempt": start["attempt"], "started_s": start["at"],
            "devices": start.get("devices", "")}  # fmt: skip
    if exited and exited["attempt"] == start["attempt"]:
        code, number = exited.get("code", 0), exited.get("signal", 0)
        how = f"signal {number}" if number else f"exit code {code}"
        reason = exited.get("refused") or f"`perdure run` ended with {how}"
        return {**told, "state": "ended", "code": code, "signal": number, "ended_s": exited["at"],
                "reason": reason + tell_memory(count_kills(folder))}  # fmt: skip
    if start["boot_id"] != now["boot_id"]:
        up_s = float(first_line("/proc/uptime").split()[0])
        return {**told, "state": "rebooted", "reason": "the machine has started anew since the "
                f"job was started; it is up for {up_s / 60:.0f} min"}  # fmt: skip
    if start_time(start["pid"]) == start["pid_start"]:
        reason = f"supervisor {start['pid']} lives"
        if "child" in start and start_time(start["child"]) != start["child_start"]:
            reason += "; `perdure run` has ended, and how is not written down yet"
        return {**told, "state": "running", "reason": reason}
    if start_time(start.get("child", 0)) == start.get("child_start", -1):
        reason = "the supervisor is gone, `perdure run` goes on"
        return {**told, "state": "orphaned", "reason": reason}
    reason = "supervisor and `perdure run` are gone, and neither wrote down why: killed"
    return {**told, "state": "killed", "reason": reason + tell_memory(count_kills(folder))}


def find_memory_events() -> str:
    """Return the file in which the kernel counts kills for memory in this cgroup; empty if none.

    In a container its path is that of another namespace, and the cgroup is the mount's root.
    """
    for line in read_text("/proc/self/cgroup").splitlines():
        _, controllers, place = line.split(":", 2)
        root, name = "/sys/fs/cgroup", "memory.events"
        if "memory" in controllers.split(","):
            root, name = "/sys/fs/cgroup/memory", "memory.oom_control"
        elif controllers:
            continue
        for folder in (root + place, root):
            path = os.path.join(folder, name)
            if os.path.exists(path):
                return path
    return ""


def count_oom_kills(path: str) -> int:
    """Return how many processes were killed for memory, by such a file; 0 where it is gone."""
    rows = map(str.split, read_text(path).splitlines())
    return sum(int(row[1]) for row in rows if row[:1] == ["oom_kill"])


def count_kills(folder: str) -> int:
    """Return how many of its cgroup's processes were killed for memory in the newest attempt."""
    start, exited = read(folder, "start.json") or {}, read(folder, "exit.json") or {}
    if exited and exited["attempt"] == start.get("attempt"):
        return int(exited.get("oom_kills", 0))
    return count_oom_kills(start.get("memory", "")) - int(start.get("oom_kills", 0))


def tell_memory(kills: int) -> str:
    """Return what is said of kills for memory since the job's start."""
    if kills <= 0:
        return ""
    return f"; out of memory: the kernel killed {kills} of its cgroup's processes meanwhile"


def tell_end(folder: str) -> dict[str, Any]:
    """Tell the job of `folder` to end, where it runs; return how it was."""
    found, start = read_job_state(folder), read(folder, "start.json") or {}
    pid = {"running": start.get("pid"), "orphaned": start.get("child")}.get(found["state"])
    if pid:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
    return found


_TAKE_S = 20.0


def take(job: dict[str, Any]) -> dict[str, Any]:
    """Kill all that a job has here, at once; return how many, and who would not go.

    `job`: `folder`, and `home`, its PERDURE_HOME, which has no other job on this box. These are its
    supervisor, which would write down how it ended, the command that this started, and what
    descends from them or is marked as theirs, whoever has adopted it. It is repeated until none is
    found, since a process may have forked while it was being counted.
    """
    start = read(job["folder"], "start.json") or {}
    roots = [
        start[name]
        for name in ("pid", "child")
        if start.get("boot_id") == boot_id()
        and start_time(start.get(name, 0)) == start.get(name + "_start", -1)
    ]
    roots += [pid for pid in list_supervisors(job["folder"]) if pid not in roots]
    killed = set()
    deadline_s = time.monotonic() + _TAKE_S
    while True:
        family = list_family(roots, job["home"])
        for pid in family:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                killed.add(pid)
        if not family or time.monotonic() > deadline_s:
            return {"killed": len(killed), "left": family}
        time.sleep(0.02)


def list_supervisors(folder: str) -> list[int]:
    """Return who supervises the job of `folder`: it may have deleted what tells of them."""
    words = [os.path.join(folder, "box.py"), "supervise", folder, ""]
    pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    return [pid for pid in pids if read_text(f"/proc/{pid}/cmdline").split("\0")[-4:] == words]


def list_family(roots: list[int], home: str) -> list[int]:
    """Return living processes: `roots` first, then those marked as of `home`, and all below."""
    parents = {}
    for name in os.listdir("/proc"):
        fields = read_stat(name) if name.isdigit() else []
        if fields and fields[0] not in "ZXx":
            parents[int(name)] = int(fields[1])
    family = [pid for pid in roots if pid in parents]
    family += [pid for pid in parents if pid not in roots and is_marked(pid, home)]
    known = set(family)
    for pid in family:  # Which grows meanwhile.
        below = [child for child, parent in parents.items() if parent == pid and child not in known]
        family += below
        known.update(below)
    return [pid for pid in family if pid != os.getpid()]


def is_marked(pid: int, home: str) -> bool:
    """Return whether a process is an agent of a job of this `home`, or was started below one.

    A person's command beside the job has the same PERDURE_HOME, and no PERDURE_JOB.
    """
    rows = read_text(f"/proc/{pid}/environ").split("\0")
    return f"PERDURE_HOME={home}" in rows and any(row.startswith("PERDURE_JOB=") for row in rows)


def hold(folder: str) -> int:
    """Hold what a start of any job here needs, until standard input ends; say whether it is held.

    Who is about to give the machine back looks at it once more meanwhile.
    """
    told = {"held": False, "why": "the job has been started again"}
    lock = take_lock(os.path.join(folder, "supervise.lock"))
    alone = take_lock(locate_box_lock()) if lock is not None else None
    if alone is not None:
        told = {"held": True, "why": ""}
    elif lock is not None:
        told["why"] = "another job of perdure's runs on the box, or starts"
    print(ANSWER + json.dumps(told), flush=True)
    if told["held"]:
        sys.stdin.read()
    return 0


def locate_box_lock() -> str:
    """Return the lock that each job here holds with the others, and a teardown alone.

    A home may be on a disk that several machines see, and so it is one of this machine's.
    """
    return os.path.join(home(), ".perdure-locks", f"box-{boot_id()}.lock")


def take_lock(path: str, *, shared: bool = False) -> int | None:
    """Return a descriptor that holds the lock at `path`; None where another holds it."""
    os.makedirs(os.path.dirname(path), exist_ok=True)
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        return None
    os.set_inheritable(fd, False)
    return fd


def take_devices(wanted: int) -> tuple[str, list[int]]:
    """Return CUDA_VISIBLE_DEVICES for `wanted` GPUs that are held by nobody, and their locks.

    On a machine without GPUs there is nothing to hold. A process that computes on a GPU holds it,
    whether it ever heard of these locks or not.

    Raises:
        LookupError: fewer are free; the message names the holders.
    """
    gpus = list_gpus()
    if not gpus or not wanted:
        return "", []
    folder = os.path.join(home(), ".perdure-locks")
    taken: dict[str, int] = {}
    holders: list[str] = []
    for gpu in gpus:
        if len(taken) == wanted:
            break
        if gpu["pids"]:
            holders.append(f"GPU {gpu['index']}: process {', '.join(gpu['pids'])}")
            continue
        lock = take_lock(os.path.join(folder, f"{gpu['uuid']}.lock"))
        if lock is None:
            holders.append(f"GPU {gpu['index']}: another run of perdure")
            continue
        taken[gpu["uuid"]] = lock
    if len(taken) < wanted:
        for lock in taken.values():
            os.close(lock)
        raise LookupError(
            f"{wanted} GPUs are wanted and {len(taken)} of {len(gpus)} are free; "
            + "; ".join(holders)
        )
    return ",".join(taken), list(taken.values())


def list_gpus() -> list[dict[str, Any]]:
    """Return the GPUs that nvidia-smi tells of, each with the processes that compute on it."""
    rows = query_smi("--query-gpu=index,uuid,name,memory.total")
    pids: dict[str, list[str]] = {}
    for row in query_smi("--query-compute-apps=gpu_uuid,pid"):
        if len(row) == 2:
            pids.setdefault(row[0], []).append(row[1])
    return [
        {"index": r[0], "uuid": r[1], "name": r[2], "memory": r[3], "pids": pids.get(r[1], [])}
        for r in rows
        if len(r) == 4
    ]


def query_smi(query: str) -> list[list[str]]:
    """Return nvidia-smi's answer as rows; none where it cannot be had."""
    lines = ask(["nvidia-smi", query, "--format=csv,noheader"], 20).splitlines()
    return [[cell.strip() for cell in line.split(",")] for line in lines if line.strip()]


def ask(command: list[str], timeout_s: float) -> str:
    """Return what a program prints; empty where it cannot be run, fails, or does not end."""
    try:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=timeout_s
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return "" if done.returncode else done.stdout.decode(errors="replace").strip()


# --- who else is on the machine

_TRAINED_S = 60.0
"""A Python of somebody else's that cannot be looked into, and has computed for so long, counts."""


def list_others() -> list[str]:
    """Return who else would lose something with this machine, in words: processes and logins.

    Those that compute on a GPU, those with torch in their memory, whoever is logged in by ssh on a
    terminal, or by any means from another address than the one that asks.
    """
    found = {}
    for gpu in list_gpus():
        for pid in gpu["pids"]:
            found[pid] = f"process {pid}{describe_process(pid)} computes on GPU {gpu['index']}"
    pids = [pid for pid in os.listdir("/proc") if pid.isdigit()]
    parents = {pid: "".join(read_stat(pid)[1:2]) for pid in pids}  # None of one that is gone.
    mine = set()
    pid = str(os.getpid())
    while pid in parents and pid not in mine:
        mine.add(pid)
        pid = parents[pid]
    for pid in sorted(set(parents) - mine, key=int):
        if pid not in found and has_torch(pid):
            found[pid] = f"process {pid}{describe_process(pid)} has torch in its memory"
    return [*found.values(), *list_logins(parents, mine)]


def list_logins(parents: dict[str, str], mine: set[str]) -> list[str]:
    """Return who is logged in by ssh beside the connection that asks."""
    asking = os.environ.get("SSH_CONNECTION", "").partition(" ")[0]
    children: dict[str, list[str]] = {}
    for pid, parent in parents.items():
        children.setdefault(parent, []).append(pid)
    found = []
    for pid in sorted(set(parents) - mine, key=int):
        service, _, session = read_text(f"/proc/{pid}/cmdline").replace("\0", " ").partition(": ")
        user, _, terminal = session.strip().partition("@")
        if service not in ("sshd", "sshd-session") or not terminal:
            continue
        froms = {read_client_address(child) for child in children.get(pid, ())} - {""}
        if terminal != "notty" or froms - {asking}:
            found.append(
                f"{user} is logged in from {', '.join(sorted(froms)) or 'somewhere'} ({terminal})"
            )
    return found


def read_client_address(pid: str) -> str:
    """Return from where the session of a process was opened; empty where it is not told."""
    rows = (line.partition("=") for line in read_text(f"/proc/{pid}/environ").split("\0"))
    return next((row[2].partition(" ")[0] for row in rows if row[0] == "SSH_CONNECTION"), "")


def has_torch(pid: str) -> bool:
    """Return whether a process has torch loaded, or may well have."""
    if not first_line(f"/proc/{pid}/comm").startswith(("python", "pt_")):
        executable = os.path.basename(read_text(f"/proc/{pid}/cmdline").partition("\0")[0])
        if not executable.startswith("python"):
            return False
    try:
        with open(f"/proc/{pid}/maps") as file:
            return any("libtorch" in line for line in file)
    except PermissionError:
        spent = sum(map(int, read_stat(pid)[11:13]))
        return spent / os.sysconf("SC_CLK_TCK") > _TRAINED_S
    except OSError:
        return False


def read_stat(pid: str | int) -> list[str]:
    """Return what the kernel tells of a process, from its state on; none where it is gone."""
    return read_text(f"/proc/{pid}/stat").rpartition(")")[2].split()


def describe_process(pid: str) -> str:
    """Return whose a process is and what it was started as, for a person; empty where unknown."""
    with contextlib.suppress(OSError, KeyError):
        user = pwd.getpwuid(os.stat(f"/proc/{pid}").st_uid).pw_name
        words = read_text(f"/proc/{pid}/cmdline").replace("\0", " ").strip()
        return f" of {user} ({words[:80] or first_line(f'/proc/{pid}/comm')})"
    return ""


def read_text(path: str) -> str:
    """Return a file's text; empty where it cannot be read."""
    try:
        with open(path, errors="replace") as file:
            return file.read()
    except OSError:
        return ""


# --- what the machine is like


_VERSION = "import sys; print(sys.version.split()[0])"
_TORCH = "import importlib.metadata as m; print(m.version('torch'))"


def probe(wanted: dict[str, Any]) -> dict[str, Any]:
    """Return what a launch has to know of this machine; nothing is changed.

    `wanted`: `places` (name -> path with variables), `python`, `mirror` (a host and port to reach,
    or empty), `folder` of the job.
    """
    places = {name: locate(path) for name, path in wanted["places"].items()}
    tools = ("tmux", "setsid", "rsync", "nvidia-smi")
    python = shutil.which(os.path.expandvars(wanted["python"])) or ""
    folder = locate(wanted["folder"])
    return {
        "boot_id": boot_id(),
        "uptime_s": float(first_line("/proc/uptime").split()[0]),
        "user": pwd.getpwuid(os.getuid()).pw_name,
        "home": home(),
        "python": python,
        "python_version": ask([python, "-c", _VERSION], 60),
        "torch": ask([python, "-c", _TORCH], 60),
        "tools": [tool for tool in tools if shutil.which(tool)],
        "places": {name: describe_place(path) for name, path in places.items()},
        "gpus": list_gpus(),
        "cuda_max": read_cuda_version(),
        "nvme": find_nvme(),
        "reached": reach(wanted["mirror"]) if wanted.get("mirror") else None,
        "lingers": lingers(),
        "starters": list_starters(),
        "state": read_job_state(os.path.join(folder, "launch")),
        "folder": folder,
    }


def locate(path: str) -> str:
    """Return `path` with variables, as the shell there would have it."""
    return os.path.normpath(os.path.expanduser(os.path.expandvars(path)))


def describe_place(path: str) -> dict[str, Any]:
    """Return the file system that `path` is on, or would be on."""
    existing = path
    while not os.path.exists(existing):
        existing = os.path.dirname(existing)
    stats = os.statvfs(existing)
    mount, kind = read_mount(existing)
    return {
        "path": path,
        "mount": mount,
        "type": kind,
        "free_bytes": stats.f_bavail * stats.f_frsize,
        "inodes": stats.f_files,
        "free_inodes": stats.f_favail,
        "writable": os.access(existing, os.W_OK),
    }


def read_mount(path: str) -> tuple[str, str]:
    """Return mount point and type of the file system of `path`."""
    real = os.path.realpath(path)
    above = [
        (point, kind)
        for point, kind in reversed(list_mounts())  # One that hides another was mounted later.
        if real == point or real.startswith(point.rstrip("/") + "/")
    ]
    return max(above, key=lambda mount: len(mount[0]), default=("/", "unknown"))


def list_mounts(device: str = "") -> list[tuple[str, str]]:
    """Return mount point and type of each file system whose device is named so, in order."""
    rows = [line.split() for line in read_text("/proc/self/mounts").splitlines()]
    return [(row[1].replace("\\040", " "), row[2]) for row in rows if row[0].startswith(device)]


def read_cuda_version() -> str:
    """Return the newest CUDA that the driver runs; empty without one."""
    _, _, rest = ask(["nvidia-smi"], 20).partition("CUDA Version:")
    return "".join(rest.split()[:1])


def find_nvme() -> str:
    """Return where a local NVMe disk is mounted; empty without one."""
    return max((point for point, _ in list_mounts("/dev/nvme")), key=len, default="")


def reach(address: str) -> bool:
    """Return whether a TCP connection to `address` (host:port) can be made in three seconds."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=3).close()
    except OSError:
        return False
    return True


def lingers() -> bool | None:
    """Return whether this user's processes outlive the last logout; None where nobody ends them."""
    if not shutil.which("loginctl") or first_line("/proc/1/comm") != "systemd":
        return None
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        user = pwd.getpwuid(os.getuid()).pw_name
        done = subprocess.run(
            ["loginctl", "show-user", user, "-p", "Linger"], stdout=subprocess.PIPE, timeout=5
        )
        return b"Linger=yes" in done.stdout
    return None


def list_starters() -> list[str]:
    """Return what would start a job again after a reboot: it has to run now, not to be installed.

    A container often has crontab and systemctl, and nothing behind them.
    """
    names = {first_line(f"/proc/{pid}/comm") for pid in os.listdir("/proc") if pid.isdigit()}
    there = {
        "systemd": shutil.which("systemctl") and first_line("/proc/1/comm") == "systemd",
        "cron": shutil.which("crontab") and names & {"cron", "crond"},
    }
    return [name for name, runs in there.items() if runs]


# --- a port of the box that others try to reach

SIOCGIFADDR = 0x8915
"""Linux's request for the address of an interface."""


def listen(for_s: float) -> dict[str, Any]:
    """Accept connections on a port for so long, in a process of its own; return port and addresses.

    What answers here would answer a rank as well: any port of any interface.
    """
    listener = socket.socket()
    listener.bind(("", 0))
    listener.listen(64)
    port = listener.getsockname()[1]
    if os.fork() == 0:
        os.setsid()
        null = os.open(os.devnull, os.O_RDWR)
        for fd in range(3):
            os.dup2(null, fd)
        signal.alarm(max(1, int(for_s)))
        while True:
            listener.accept()[0].close()
    return {"port": port, "interfaces": list_interfaces()}


def list_interfaces() -> list[tuple[str, str]]:
    """Return name and IPv4 address of each interface that has one."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            with contextlib.suppress(OSError):
                told = fcntl.ioctl(asking.fileno(), SIOCGIFADDR, request)
                found.append((name, socket.inet_ntoa(told[20:24])))
    return found


# --- small things


def home() -> str:
    """Return this user's home."""
    return os.path.expanduser("~")


def boot_id() -> str:
    """Return the id that the kernel takes anew at each start of the machine."""
    return first_line("/proc/sys/kernel/random/boot_id")


def first_line(path: str) -> str:
    """Return the first line of a file; empty where it cannot be read."""
    return read_text(path).partition("\n")[0].strip()


def start_time(pid: int) -> int:
    """Return when process `pid` was started, in ticks since boot; 0 where it is gone or dead."""
    fields = read_stat(pid)
    return int(fields[19]) if fields and fields[0] not in "ZX" else 0


def read(folder: str, name: str) -> dict[str, Any] | None:
    """Return a document of the job's folder; None where there is none."""
    try:
        with open(os.path.join(folder, name)) as file:
            document: dict[str, Any] = json.load(file)
            return document
    except (OSError, ValueError):
        return None


def write(folder: str, name: str, document: dict[str, Any]) -> None:
    """Replace a document so that it is there whole, also after a loss of power."""
    path = os.path.join(folder, name)
    temporary = f"{path}.{os.getpid()}"
    failpoint("supervise/write", name)
    with open(temporary, "w") as file:
        json.dump(document, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    fd = os.open(folder, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)


def failpoint(name: str, about: str = "") -> None:
    """Have the fault of a test happen here; without its variable nothing is imported."""
    if os.environ.get("PERDURE_FAILPOINTS"):
        from perdure import failpoints

        failpoints.failpoint(name, about)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
