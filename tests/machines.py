"""Run the core and the serial part of the tests on machines that once broke them.

usage: python -m tests.machines [--strict] [--parts PART ...] [MACHINE ...]

A MACHINE is one condition, or several joined by `+`. Conditions:

  uptime   the machine started 20 s ago (a time namespace; needs root)
  busy     four processes that never wait run beside the tests
  zone     an odd time zone, and a locale that is not installed
  core     one core
  tmp      TMPDIR has a long name, and a job of perdure runs in it
  home     HOME cannot be written
  user     an ordinary user, who may not trace processes (a mount namespace; needs root)

Exit code 1 if the suite failed on a machine, 2 if the arguments are wrong.
"""

import argparse
import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bench.sweep import sweep_after_me

from tests.suite import PARTS, ROOT
from tests.waiting import PATIENCE_S

DEFAULT = ("uptime+zone", "busy", "core+tmp", "home+user")
UPTIME_S = 20
BUSY = 4
LONG_NAME = "a-long-name-such-as-schedulers-give-to-the-folder-of-a-job-0123456789"


@dataclass(slots=True)
class Setting:
    """How a command runs on a machine: what stands before it, and its environment."""

    prefix: list[str] = field(default_factory=list)
    env: dict[str, str] = field(default_factory=lambda: dict(os.environ))


@contextlib.contextmanager
def start_late(setting: Setting) -> Iterator[None]:
    """Give the monotonic clock and the uptime a start that was `UPTIME_S` ago."""
    uptime_s = float(Path("/proc/uptime").read_text().split()[0])
    offset = str(UPTIME_S - int(uptime_s))
    setting.prefix += ["unshare", "--time", "--monotonic", offset, "--boottime", offset, "--fork"]
    yield


@contextlib.contextmanager
def keep_busy(setting: Setting) -> Iterator[None]:
    """Run processes that never wait."""
    command = [sys.executable, "-c", "while True: pass"]
    spinning = [subprocess.Popen(command, env=setting.env) for _ in range(BUSY)]
    try:
        yield
    finally:
        for process in spinning:
            process.kill()
            process.wait()


@contextlib.contextmanager
def move_zone(setting: Setting) -> Iterator[None]:
    """Use a time zone 12 h 45 min off UTC, and the locale that an SSH client might pass on."""
    setting.env |= {"TZ": "Pacific/Chatham", "LANG": "tr_TR.UTF-8", "LC_ALL": "tr_TR.UTF-8"}
    yield


@contextlib.contextmanager
def use_one_core(setting: Setting) -> Iterator[None]:
    """Bind the tests to one of the cores that this process may use."""
    setting.prefix += ["taskset", "--cpu-list", str(min(os.sched_getaffinity(0)))]
    yield


@contextlib.contextmanager
def share_tmp(setting: Setting) -> Iterator[None]:
    """Give temporary files a folder with a long name, in which another job runs."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        tmp = Path(folder) / LONG_NAME
        tmp.mkdir(mode=0o1777)
        tmp.chmod(0o1777)
        setting.env["TMPDIR"] = str(tmp)
        script = tmp / "neighbour.py"
        script.write_text("import time\nwhile True:\n    time.sleep(0.1)\n")
        env = setting.env | {"PERDURE_HOME": str(tmp / "state")}
        perdure = [sys.executable, "-m", "perdure"]
        command = [*perdure, "run", "--name", "neighbour", "-n", "2", str(script)]
        with open(tmp / "neighbour.out", "wb") as out:
            job = subprocess.Popen(command, env=env, cwd=tmp, stdout=out, stderr=out)
        try:
            yield
            assert job.poll() is None, f"the neighbour ended: {(tmp / 'neighbour.out').read_text()}"
        finally:
            subprocess.run([*perdure, "stop", "neighbour"], env=env, cwd=tmp, timeout=PATIENCE_S)
            job.wait(PATIENCE_S)


@contextlib.contextmanager
def close_home(setting: Setting) -> Iterator[None]:
    """Name a HOME that cannot be made, even by root."""
    setting.env["HOME"] = "/dev/null/home"
    setting.env.pop("XDG_CACHE_HOME", None)
    yield


@contextlib.contextmanager
def become_user(setting: Setting) -> Iterator[None]:
    """Run as an ordinary user: no capabilities, no ptrace, nothing written into the checkout."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        own = Path(folder)
        own.chmod(0o711)
        for name in ("home", "cache", "tmp"):
            (own / name).mkdir()
            shutil.chown(own / name, *ORDINARY)
        if setting.env.get("HOME") != "/dev/null/home":
            setting.env["HOME"] = str(own / "home")
        setting.env.setdefault("TMPDIR", str(own / "tmp"))
        setting.env |= {
            "PYTHONPYCACHEPREFIX": str(own / "cache"),
            "HYPOTHESIS_STORAGE_DIRECTORY": str(own / "cache"),
            "PYTEST_ADDOPTS": "-p no:cacheprovider",
            "USER": "mallory",
            "LOGNAME": "mallory",
        }
        setting.env.pop("XDG_RUNTIME_DIR", None)
        setting.prefix += ["unshare", "--mount", "--propagation", "private"]
        setting.prefix += [sys.executable, "-m", "tests.ordinary"]
        yield


ORDINARY = (65534, 65534)
"""The user and group id of `nobody`."""
# The order matters: namespaces are made while the command is still root's.
CONDITIONS = {
    "busy": keep_busy,
    "zone": move_zone,
    "core": use_one_core,
    "tmp": share_tmp,
    "home": close_home,
    "uptime": start_late,
    "user": become_user,
}
NEED_ROOT = {"uptime", "user"}


def run_machine(machine: str, words: Sequence[str]) -> int:
    """Run the suite with `words` on `machine`; return its exit code."""
    names = machine.split("+")
    setting = Setting()
    with contextlib.ExitStack() as stack:
        for name, change in CONDITIONS.items():
            if name in names:
                stack.enter_context(change(setting))
        print(f"machines: {machine}", flush=True)
        command = [*setting.prefix, sys.executable, "-m", "tests.suite", *words]
        return subprocess.run(command, cwd=ROOT, env=setting.env, check=False).returncode


def print_verdict(codes: Mapping[str, int]) -> None:
    """Print one line for each machine."""
    for machine, code in codes.items():
        print(f"machines: {machine}: {'passed' if code == 0 else f'FAILED (exit code {code})'}")


def main() -> int:
    """Run the suite on each machine; return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--strict", action="store_true", help="fail at any second try")
    parser.add_argument("--parts", nargs="+", choices=tuple(PARTS), default=["core", "serial"])
    parser.add_argument("machines", nargs="*", metavar="MACHINE", help="conditions joined by +")
    options = parser.parse_args()
    machines = dict.fromkeys(options.machines or DEFAULT)
    for name in [name for machine in machines for name in machine.split("+")]:
        if name not in CONDITIONS:
            parser.error(f"unknown condition {name}; conditions are {', '.join(CONDITIONS)}")
        if name in NEED_ROOT and os.geteuid() != 0:
            parser.error(f"the condition {name} needs root")
    sweep_after_me()
    words = [*(["--strict"] if options.strict else []), *options.parts]
    codes = {machine: run_machine(machine, words) for machine in machines}
    print_verdict(codes)
    return 1 if any(codes.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
