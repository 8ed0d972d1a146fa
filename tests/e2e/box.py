"""A box: a private sshd on loopback with a home of its own, and a laptop that launches to it."""

import contextlib
import json
import os
import random
import shutil
import socket
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.waiting import PATIENCE_S, wait_until

SSHD = shutil.which("sshd") or "/usr/sbin/sshd"
MISSING = [tool for tool in ("ssh", "rsync", "ssh-keygen", SSHD) if not shutil.which(tool)]
EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "gpt"

_SSHD_CONFIG = """\
Port {port}
ListenAddress {address}
HostKey {folder}/host_key
PidFile none
AuthorizedKeysFile {folder}/id.pub
PermitRootLogin prohibit-password
PasswordAuthentication no
KbdInteractiveAuthentication no
UsePAM no
StrictModes no
PrintMotd no
SetEnv HOME={folder}/home PERDURE_HOME={folder}/not-this-one{more}
"""
_SSH_CONFIG = """\
Host {name}
  HostName {address}
  Port {port}
  IdentityFile {folder}/id
  IdentitiesOnly yes
  UserKnownHostsFile {folder}/known_hosts
  StrictHostKeyChecking accept-new
"""


def find_port() -> int:
    """Return a free port that the kernel gives to nobody who asks for any port."""
    with open("/proc/sys/net/ipv4/ip_local_port_range") as file:
        lowest = int(file.read().split()[0])
    while True:
        port = random.SystemRandom().randrange(10_000, max(lowest, 11_000))
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("0.0.0.0", port))
            return port


class Box:
    """The box; `cut` breaks its connections, `reboot` ends everything on it.

    With `space` it is in a network namespace, where `address` is its own. `environ` is what its
    sshd gives to each session besides.
    """

    def __init__(
        self,
        folder: Path,
        *,
        name: str = "gpu-box",
        address: str = "127.0.0.1",
        space: str = "",
        environ: Mapping[str, str] | None = None,
    ) -> None:
        self.folder, self.home = folder, folder / "home"
        self.name, self.address, self._space = name, address, space
        self.home.mkdir(parents=True)
        self.port = find_port()
        for key in ("host_key", "id"):
            command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / key)]
            subprocess.run(command, check=True, timeout=PATIENCE_S)
        values = {"port": self.port, "folder": folder, "name": name, "address": address}
        more = "".join(f' "{key}={value}"' for key, value in (environ or {}).items())
        (folder / "sshd_config").write_text(_SSHD_CONFIG.format(**values, more=more))
        (folder / "ssh_config").write_text(_SSH_CONFIG.format(**values))
        self.server: subprocess.Popen[bytes] | None = None

    def start(self, *, boot_id: str = "") -> None:
        """Start sshd; with `boot_id`, in a mount namespace where the kernel's is this one.

        There cron's files are the box's own as well, and what a start of the machine empties is
        empty.
        """
        Path("/run/sshd").mkdir(exist_ok=True)
        command = [SSHD, "-D", "-f", str(self.folder / "sshd_config")]
        if boot_id:
            (self.folder / "boot_id").write_text(boot_id + "\n")
            own = {"boot_id": "/proc/sys/kernel/random/boot_id"}
            if Path("/var/spool/cron/crontabs").exists():
                (self.folder / "crontabs").mkdir(exist_ok=True)
                (self.folder / f"run-{boot_id}" / "sshd").mkdir(parents=True)
                own |= {"crontabs": "/var/spool/cron/crontabs", f"run-{boot_id}": "/run"}
            binds = [f"mount --bind {self.folder}/{name} {place}" for name, place in own.items()]
            script = " && ".join([*binds, f"exec {' '.join(command)}"])
            command = ["unshare", "-m", "sh", "-c", script]
        if self._space:
            command = ["ip", "netns", "exec", self._space, *command]
        with open(self.folder / "sshd.log", "ab") as log:
            self.server = subprocess.Popen(command, stdout=log, stderr=log)
        wait_until(self._answers, f"sshd: see {self.folder}/sshd.log")

    def _answers(self) -> bool:
        assert self.server is not None
        assert self.server.poll() is None, (self.folder / "sshd.log").read_text()
        with socket.socket() as probe:
            return probe.connect_ex((self.address, self.port)) == 0

    def cut(self) -> int:
        """Break every connection, as a network does that goes away; return how many there were."""
        assert self.server is not None
        sessions = psutil.Process(self.server.pid).children()
        for session in sessions:
            session.kill()
        _, alive = psutil.wait_procs(sessions, timeout=PATIENCE_S)
        assert not alive, alive
        return len(sessions)

    def find_processes(self) -> list[psutil.Process]:
        """Return every process of the box but its sshd."""
        found = []
        for process in psutil.process_iter():
            try:
                mine = process.environ().get("HOME") == str(self.home)
                if mine and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def power_off(self) -> None:
        """End everything at once."""
        if self.server is not None and self.server.poll() is None:
            self.cut()
            self.server.kill()
            self.server.wait()
        wait_until(lambda: not self._kill_processes(), f"end of {self.find_processes()}")

    def _kill_processes(self) -> bool:
        """Kill every process of the box; return whether there was one."""
        processes = self.find_processes()
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        return bool(processes)

    def reboot(self) -> None:
        """End everything, and start again with another boot id."""
        self.power_off()
        self.start(boot_id=str(uuid.uuid4()))


class Laptop:
    """The machine of the person: a state directory, a profile `box`, and the command line.

    With `others` the profile is that of several boxes, of which `box` is the first.
    """

    def __init__(
        self, folder: Path, box: Box, *, others: Sequence[Box] = (), **profile: Any
    ) -> None:
        self.folder, self.box, self.boxes = folder, box, (box, *others)
        self.ssh_config = folder / "ssh_config"
        configs = [(each.folder / "ssh_config").read_text() for each in self.boxes]
        self.ssh_config.write_text("".join(configs))
        self.home = folder / "state"
        (self.home / "profiles").mkdir(parents=True)
        self.stopped = folder / "stopped"
        hosts = json.dumps([each.name for each in self.boxes])
        place = f"hosts = {hosts}" if others else f'host = "{box.name}"'
        told = f"{self.stopped}-{{job}}" + ("-{host}" if others else "")
        text = (
            f'[launch]\n{place}\nssh_config = "{self.ssh_config}"\n'
            f'python = "{sys.executable}"\nconnect_timeout_s = 30\n'
            f'environment = "{profile.get("environment", "auto")}"\nnative = false\n'
            f'[teardown]\nstop_command = ["touch", "{told}"]\n'
            f'gone_command = ["test", "-e", "{told}"]\n'
            f'[interruption]\nrelaunch = "{profile.get("relaunch", "none")}"\n'
            f"[daemon]\ntools = {json.dumps(profile.get('tools', ['tmux', 'setsid']))}\n"
            f'[overrides]\nDETACH = "{profile.get("detach", "")}"\n'
        )
        (self.home / "profiles" / "box.toml").write_text(text)
        self.env = dict(os.environ, PERDURE_HOME=str(self.home), COLUMNS="120")

    def start(self, *args: str) -> "subprocess.Popen[str]":
        """Start a perdure command."""
        return subprocess.Popen(
            [sys.executable, "-m", "perdure", *args],
            env=self.env, cwd=self.folder, text=True, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip

    def cli(self, *args: str, code: int = 0) -> "subprocess.CompletedProcess[str]":
        """Run a perdure command to its end, which has to be `code`."""
        done = subprocess.run(
            [sys.executable, "-m", "perdure", *args],
            env=self.env, cwd=self.folder, capture_output=True, text=True, timeout=PATIENCE_S,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
        assert done.returncode == code, f"{args}: {done.returncode}\n{done.stdout}{done.stderr}"
        return done

    def ssh(self, script: str, stdin: str = "", box: Box | None = None) -> str:
        """Return the output of a script on a box (the first one), run without perdure."""
        words = ["ssh", "-F", str(self.ssh_config), (box or self.box).name, script]
        return subprocess.run(
            words, input=stdin, capture_output=True, text=True, timeout=PATIENCE_S, check=True
        ).stdout

    def ask(self, *args: str) -> dict[str, Any]:
        """Return a command's answer as JSON."""
        document: dict[str, Any] = json.loads(self.cli(*args, "--json").stdout)
        return document

    def wait_step(self, job: str, step: int) -> None:
        """Wait until the job on the box has committed `step`, by the box's own files."""
        state = self.box.home / "perdure" / "state" / "jobs" / job / "state.json"
        wait_until(lambda: read_json(state).get("step", -1) >= step, f"step {step}")

    def train_reference(self, steps: int) -> None:
        """Train the project's exact script here, undisturbed, with its trail in `reference`."""
        folder = self.folder / "reference"
        folder.mkdir()
        script = self.folder / "project" / "train_exact.py"
        command = [sys.executable, "-m", "perdure", "run", "-n", "2", "--name", "reference"]
        subprocess.run(
            [*command, str(script), "--trail", str(folder), "--steps", str(steps)],
            env=self.env, check=True, timeout=PATIENCE_S, capture_output=True,
        )  # fmt: skip

    def disconnect(self) -> None:
        """End connections that are kept open for the next command."""
        config = str(self.ssh_config)
        for process in psutil.process_iter():
            try:
                if config in process.cmdline() and process.name() == "ssh":
                    process.kill()
            except psutil.Error:
                continue


def read_json(path: Path) -> dict[str, Any]:
    """Return a document; empty where there is none yet."""
    try:
        document: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return document


def make_boxes(tmp_path: Path, **environ: str) -> Iterator[Callable[..., Laptop]]:
    """Yield a function that starts a box and a laptop; afterwards nothing of either is left."""
    laptops: list[Laptop] = []

    def make(boot_id: str = "", **profile: Any) -> Laptop:
        number = len(laptops)
        box = Box(tmp_path / f"box{number}", environ=environ)
        box.start(boot_id=boot_id)
        (tmp_path / f"laptop{number}").mkdir()
        laptops.append(Laptop(tmp_path / f"laptop{number}", box, **profile))
        return laptops[-1]

    try:
        yield make
    finally:
        for laptop in laptops:
            laptop.disconnect()
            laptop.box.power_off()


needs_sshd = pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}")
