"""One session of a notebook, from its checks to its status. Nothing but Python's own library.

The source of this file is a cell of every notebook, and the other cells call it. A step that fails
ends the session at once, in one line. On Kaggle a cell that raises would lose the output of the
whole version, the checkpoints of earlier sessions among it: there the steps that follow do nothing.
"""

import base64
import fcntl
import glob
import hashlib
import importlib
import io
import json
import lzma
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any

PROBE = """
import sys, torch
wanted = sys.argv[1]
if wanted == "cuda" and not torch.cuda.is_available():
    sys.exit(f"torch {torch.__version__} sees no GPU: this session runs on the CPU")
names = [f"cuda:{i}" for i in range(torch.cuda.device_count())] if wanted == "cuda" else ["cpu"]
for name in names:
    a = torch.arange(65536.0).reshape(256, 256) / 65536
    got = (a.to(name) @ a.to(name)).cpu()
    assert torch.allclose(got, a @ a, rtol=1e-2), f"{name} multiplies wrongly"
    what = torch.cuda.get_device_name(name) if wanted == "cuda" else "CPU"
    print(f"{name}: {what}, torch {torch.__version__}: a product of matrices is right")
"""
"""In a process of its own, so that the notebook itself holds no memory of the GPU."""


class SessionError(Exception):
    """Raised where this session cannot train; the message says why in one line."""


class Session:
    """What is known of this session while its cells run."""

    def __init__(self, settings: dict[str, Any]) -> None:
        """Begin, or begin again in the same session: every step may be repeated."""
        self.settings = settings
        self.job: str = settings["job"]
        self.kaggle: bool = settings["service"] == "kaggle"
        self.durable = os.path.join(settings["durable_dir"], self.job)
        self.data = os.path.join(settings["data_dir"], self.job)
        self.began_s = read_session_start_s(settings["session_max_s"])
        self.ended = ""
        self.secrets: dict[str, str] = {}

    def step(self, what: str, act: Callable[[], str]) -> None:
        """Do one step and print what it found; where it fails, end the session."""
        if self.ended:
            print(f"{what}: not done: {self.ended}")
            return
        try:
            print(f"{what}: {act()}", flush=True)
        except Exception as error:
            self.end("refused", f"{what}: {error}")

    def end(self, state: str, reason: str) -> None:
        """Leave the status in the durable place, and stop."""
        self.ended = reason
        print(f"perdure: {state}: {reason}", flush=True)
        # A folder below the place of a mount that is not there would hinder the next attempt.
        if self.kaggle or os.path.ismount(self.settings["mount"]):
            self.write_status(state, reason)
        if not self.kaggle:
            raise SessionError(reason) from None

    def write_status(self, state: str, reason: str) -> None:
        """Leave the status in the durable place, beside what the session before said of itself."""
        before = read_status(self.durable)
        status = {
            "job": self.job, "state": state, "reason": reason, "ended_s": time.time(),
            "session": before.get("session", 0), "checkpoint": before.get("checkpoint", -1),
        }  # fmt: skip
        try:
            os.makedirs(self.durable, exist_ok=True)
            write_durably(os.path.join(self.durable, "status.json"), json.dumps(status))
        except OSError as error:
            print(f"perdure: {self.durable}: {error}")

    def show_durable(self) -> str:
        """Bring what earlier sessions left, and see that a file written there is there.

        Drive shows also what it has only in its cache: there the file is looked for after Drive
        was flushed and mounted anew.
        """
        self.wait_for_earlier()
        if not self.kaggle:
            self.mount()
        carried = self.carry() if self.kaggle else ""
        os.makedirs(self.durable, exist_ok=True)
        token = f"{time.time_ns()}-{os.getpid()}"
        name = f".probe-{token}"
        path = os.path.join(self.durable, name)
        write_durably(path, token)
        if not self.kaggle:
            self.mount_anew()
        if not (os.path.isdir(self.durable) and name in os.listdir(self.durable)):
            raise SessionError(f"{self.durable}: what was written there is not there")
        with open(path, encoding="utf-8") as file:
            read = file.read()
        os.remove(path)
        if read != token:
            raise SessionError(f"{self.durable}: what was written there has changed")
        found = self.list_checkpoints()
        newest = f"the newest is {found[-1]}" if found else "this job begins"
        free = shutil.disk_usage(self.durable).free / 1e9
        return f"{self.durable}: {carried}{len(found)} checkpoints, {newest}; {free:.1f} GB free"

    def wait_for_earlier(self) -> None:
        """Wait until a job that an earlier run of these cells started has saved and left.

        The end of its kernel told it to. Unmounting Drive, or unpacking over it, would disturb it.
        """
        deadline = time.monotonic() + self.settings["stop_before_s"]
        os.makedirs(self.settings["data_dir"], exist_ok=True)
        with open(f"{self.data}.lock", "ab") as lock:
            while True:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    return
                except BlockingIOError:
                    if time.monotonic() > deadline:
                        raise SessionError("the job of an earlier run has not left") from None
                time.sleep(0.5)

    def mount(self) -> None:
        """Mount Drive, which asks a person; see that it is one and not the machine's own disk."""
        drive: Any = importlib.import_module("google.colab.drive")
        drive.mount(self.settings["mount"])
        if not os.path.ismount(self.settings["mount"]):
            raise SessionError(f"{self.settings['mount']} is not mounted")

    def mount_anew(self) -> None:
        """Have Drive take what it holds back, and mount it again: so it is seen what it has."""
        drive: Any = importlib.import_module("google.colab.drive")
        drive.flush_and_unmount()
        self.mount()

    def carry(self) -> str:
        """Copy what the newest version left (below /kaggle/input) to where this one writes.

        It is there under its name only when it is there whole, checkpoints and all: a copy that
        broke off (the kernel died, the disk was full) is begun again.
        """
        found = []
        for above in ("*", "*/*", "*/*/*"):
            pattern = os.path.join(self.settings["input_dir"], above, self.job, "checkpoints")
            for path in glob.glob(pattern):
                place = os.path.dirname(path)
                found.append((read_status(place).get("ended_s", 0.0), place))
        if not found:
            return ""
        source = max(found)[1]
        # Where there are checkpoints, these cells ran before in this very session.
        if not os.path.exists(os.path.join(self.durable, "checkpoints")):
            coming = f"{self.durable}.coming"
            shutil.rmtree(coming, ignore_errors=True)
            try:
                shutil.copytree(source, coming)
                shutil.rmtree(self.durable, ignore_errors=True)  # The status of a failed attempt.
                os.rename(coming, self.durable)
            finally:
                shutil.rmtree(coming, ignore_errors=True)
        return f"carried over from {source}; "

    def list_checkpoints(self) -> list[str]:
        """Return the names of whole checkpoints; what they hold is hashed when one is loaded."""
        manifests = glob.glob(os.path.join(self.durable, "checkpoints", "step-*", "manifest.json"))
        return sorted(os.path.basename(os.path.dirname(path)) for path in manifests)

    def check_accelerator(self) -> str:
        """Multiply matrices on each GPU: `is_available` is also true where no kernel would run."""
        command = [sys.executable, "-c", PROBE, self.settings["device"]]
        return "; ".join(run(command, 300, "it said nothing").split("\n")).strip("; ")

    def check_internet(self) -> str:
        """Reach the world once, in ten seconds."""
        url = self.settings["internet_url"]
        try:
            urllib.request.urlopen(url, timeout=10).close()
        except urllib.error.HTTPError as error:
            error.close()  # Whoever answers was reached.
        except OSError as error:
            where = "Settings > Internet, on an account with a phone number" if self.kaggle else ""
            raise SessionError(f"{url} is not reached ({error}). {where}".strip()) from None
        return f"{url} answers"

    def unpack(self, payload: str) -> str:
        """Unpack project, job and wheel; a project of an earlier run of this cell goes first."""
        shutil.rmtree(self.data, ignore_errors=True)
        raw = lzma.decompress(base64.b85decode(payload.replace("\n", "")))
        with tarfile.open(fileobj=io.BytesIO(raw)) as archive:
            if hasattr(tarfile, "data_filter"):
                archive.extractall(self.data, filter="data")
            else:  # Python before 3.11.4.
                archive.extractall(self.data)
            count = len(archive.getnames())
        return f"{count} files to {self.data}"

    def install(self) -> str:
        """Install perdure's wheel and what the job asks for, beside the service's own torch."""
        for name in self.settings["secrets"]:
            self.secrets[name] = read_secret(name, self.kaggle)
        wheel = os.path.join(self.data, self.settings["wheel"])
        wanted = [wheel, *self.settings["packages"]]
        if self.settings["requirements"]:
            wanted += ["-r", os.path.join(self.data, "project", self.settings["requirements"])]
        # First by itself: another perdure of the same version would count as installed.
        for words in (["--force-reinstall", "--no-deps", wheel], wanted):
            command = [sys.executable, "-m", "pip", "install", "--quiet", *words]
            run(command, 1800, "pip failed")
        return " ".join(wanted)

    def train(self) -> str:
        """Run the job until it is done, or until it has to leave this session; show its output."""
        settings = os.path.join(self.data, "session.json")
        known = {"durable": self.durable, "data": self.data, "began_s": self.began_s}
        with open(settings, "w", encoding="utf-8") as file:
            json.dump(self.settings | known, file)
        command = [sys.executable, "-P", "-m", "perdure.launch.notebook.runner", settings]
        env = {**os.environ, **self.secrets}
        env["PERDURE_HOME"] = os.path.join(self.settings["data_dir"], "state")
        output = os.path.join(self.data, "run.out")
        before = read_status(self.durable)
        # To a file, not a pipe: the job outlives a notebook that stops reading.
        with open(output, "wb") as sink, open(output, encoding="utf-8", errors="replace") as lines:
            process = subprocess.Popen(
                command, stdout=sink, stderr=subprocess.STDOUT, env=env, start_new_session=True
            )
            while True:
                over = process.poll() is not None
                try:
                    print(lines.read(), end="", flush=True)
                    if over:
                        break
                    time.sleep(0.5)
                except KeyboardInterrupt:
                    print("perdure: stops at an agreed step", flush=True)
                    process.send_signal(signal.SIGTERM)
        status = read_status(self.durable)
        if status == before:
            raise SessionError(f"the job's own process ended with {process.returncode}")
        if not self.kaggle:
            self.settle()
        return f"{status.get('state')}: {status.get('reason')}"

    def settle(self) -> None:
        """Have Drive take what it holds back, and look again: only then is it saved."""
        before = self.hash_newest()
        self.mount_anew()
        after = self.hash_newest()
        lost = sorted(path for path, digest in before.items() if after.get(path) != digest)
        if lost:
            raise SessionError(f"Drive lacks {lost[0]} after it was mounted anew: keep this open")
        print(f"Drive, mounted anew, has the {len(before)} files of the newest checkpoint")

    def hash_newest(self) -> dict[str, str]:
        """Return path -> SHA-256 of each file of the newest checkpoint."""
        newest = os.path.join(self.durable, "checkpoints", (self.list_checkpoints() or ["-"])[-1])
        digests = {}
        for path in sorted(glob.glob(os.path.join(newest, "**"), recursive=True)):
            if os.path.isfile(path):
                with open(path, "rb") as file:
                    digests[path] = hashlib.file_digest(file, "sha256").hexdigest()
        return digests

    def tell(self) -> str:
        """Say what follows this session."""
        status = read_status(self.durable)
        follows = {
            "requeue": "run all cells in another session: it goes on from there",
            "leave": "nothing follows",
        }
        step = f"newest checkpoint at step {status.get('checkpoint', -1)}"
        return f"{step}; {follows.get(status.get('next', ''), status.get('reason', 'unknown'))}"


def read_session_start_s(session_max_s: float) -> float:
    """Return the Unix time at which this session began: that of its first process.

    Where that is older than a session can be, this is no container, and it begins here.
    """
    now = time.time()
    try:
        with open("/proc/1/stat", encoding="utf-8") as file:
            ticks = int(file.read().rpartition(")")[2].split()[19])
        with open("/proc/uptime", encoding="utf-8") as file:
            age_s = float(file.read().split()[0]) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return now
    return now - age_s if 0 <= age_s < session_max_s else now


def read_status(place: str) -> dict[str, Any]:
    """Return what the newest session left there; empty before the first."""
    try:
        with open(os.path.join(place, "status.json"), encoding="utf-8") as file:
            return dict(json.load(file))
    except (OSError, ValueError):
        return {}


def run(command: list[str], timeout_s: float, otherwise: str) -> str:
    """Return what a program prints; where it fails, its last words end the session."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s)
    if done.returncode:
        raise SessionError((done.stderr.strip().splitlines() or [otherwise])[-1])
    return done.stdout


def read_secret(name: str, kaggle: bool) -> str:
    """Return a secret as the service keeps it."""
    if kaggle:
        secrets: Any = importlib.import_module("kaggle_secrets")
        return str(secrets.UserSecretsClient().get_secret(name))
    userdata: Any = importlib.import_module("google.colab.userdata")
    return str(userdata.get(name))


def write_durably(path: str, text: str) -> None:
    """Write a small file so that it is whole or as it was."""
    temporary = f"{path}.{os.getpid()}.tmp"
    with open(temporary, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
