"""The program of a pod: one node of a job, the first with the job's own process.

    python -m perdure.launch.kubernetes.pod

The first pod runs `perdure run` and leaves an invitation on the volume; each other one joins with
it, and joins anew once a later first pod has written another. SIGTERM is passed on: the first
stops at an agreed step with a checkpoint, the others are left. Both end with a code that says that
the pod is to come again.
"""

import contextlib
import fcntl
import os
import pwd
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO

import msgspec

from perdure.launch.exchange import last_line
from perdure.launch.kubernetes.manifest import AGAIN, CONFIG_DIR, PROJECT
from perdure.launch.kubernetes.project import PACKED, unpack
from perdure.launch.runs import follow, hear, locate_own_job, look_at_job, say
from perdure.model.job import JobSpec
from perdure.model.platforms.kubernetes import LEFT_ON_NOTICE, POD_UNFIT

_WORDS = {int(signal.SIGTERM): "the pod is told to go"}
_POLL_S = 0.2
_CALL_S = 60.0
_PROBE_S = 180.0
_PROBE = """\
import sys, torch
n = torch.cuda.device_count()
if n < int(sys.argv[1]):
    sys.exit(f"{n} GPUs are visible of {sys.argv[1]}")
for i in range(n):
    x = torch.ones(64, 64, device=f"cuda:{i}")
    if (x @ x).sum().item() != 64.0 ** 3:
        sys.exit(f"GPU {i} computes wrongly")
"""


def make_user_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return what a user without a line in /etc/passwd lacks: a home to write to, and a name.

    Libraries put caches below the first, and ask for the second where they name a file in /tmp.
    """
    lacking = {}
    home = environ.get("HOME", "/")
    if not os.access(home, os.W_OK) or home == "/":
        lacking["HOME"] = tempfile.gettempdir()
    try:
        pwd.getpwuid(os.getuid())
    except KeyError:
        lacking["USER"] = environ.get("USER", "perdure")
    return lacking


class Pod:
    """One pod's part of a job."""

    def __init__(self, spec: JobSpec, environ: dict[str, str], config: Path) -> None:
        """Be the pod of `environ`; `config` is the job's document, from the ConfigMap."""
        self.spec, self.config = spec, config
        self.first = read_pod_role(environ) == "first"
        durable = environ["PERDURE_DURABLE_DIR"]
        launch = config.parent / "launch"
        number = launch.read_text().strip() if launch.exists() else "by-hand"
        self.place = Path(durable, "launched", spec.name, number)
        self.invitation, self.ended = self.place / "invitation.json", self.place / "ended"
        # Of two pods with one PERDURE_HOME, each would take the other's job for its own.
        node = f"nodes/{environ.get('PERDURE_POD_NAME', 'pod')}"
        self.home = f"{durable}/state" if self.first else f"{durable}/{node}"
        self.env = {**environ, **make_user_variables(environ), "PERDURE_HOME": self.home}
        self.address = environ.get("PERDURE_POD_IP", "127.0.0.1")
        self.grace_s = max(1.0, float(environ.get("PERDURE_POD_GRACE_S", "30")))
        self.settle_s = _CALL_S
        """How long the first pod may take to say how the job ended."""
        self.told: list[int] = []
        """Signals by which the pod was told to go."""
        self.inviting = self.first and spec.remote > 0
        self.perdure = [sys.executable, "-P", "-m", "perdure"]

    def run(self) -> int:
        """Be the pod; return its exit code."""
        try:
            os.makedirs(self.place, exist_ok=True)
            os.makedirs(self.home, exist_ok=True)
        except PermissionError as error:
            say(
                f"user {os.getuid()} may not write {error.filename}; where the volume's driver "
                "takes no kubernetes.fs_group, kubernetes.run_as_user is the volume's owner"
            )
            return 2
        if not self.first:
            return self.join()
        with open(self.place.parent / "first.lock", "w") as lock:
            if not self.wait_alone(lock):
                return LEFT_ON_NOTICE if self.told else POD_UNFIT
            return self.be_first()

    def wait_alone(self, lock: IO[str]) -> bool:
        """Wait until the first pod before this one has left; return whether it has.

        A Job makes the next pod as soon as one is told to go, and not once it is gone: until its
        grace is over it saves, and holds the lock.
        """
        until_s, said = time.monotonic() + 2 * self.grace_s + _CALL_S, False
        while not self.told and time.monotonic() < until_s:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            except BlockingIOError:
                if not said:
                    say("waits until the pod before it has saved and left")
                said = True
                time.sleep(_POLL_S)
            except OSError as error:  # A file system without locks.
                say(f"cannot tell whether the pod before it has left: {error}")
                return True
        return False

    def be_first(self) -> int:
        """Run the job, and be one of its nodes; return the exit code."""
        self.ended.unlink(missing_ok=True)
        packed = self.config.with_name(PACKED)
        if packed.exists():
            unpack(packed.read_bytes(), self.place.parent / PROJECT)
        command = [*self.perdure, "run", "-c", str(self.config), "--name", self.spec.name]
        if self.spec.remote:
            self.invitation.unlink(missing_ok=True)
            # Of the pod before: an invitation made of it would lead the others to where that was.
            stale = locate_own_job(self.spec.name, self.home)
            for path in (stale.endpoint, stale.credential("joiner")):
                Path(path).unlink(missing_ok=True)
            command += ["--placement", self.write_placement()]
        code = follow(subprocess.Popen(command, env=self.env), self.told, _WORDS, self.invite_once)
        state, _ = look_at_job(locate_own_job(self.spec.name, self.home))
        code = decide_code(code, state, bool(self.told))
        if code not in (LEFT_ON_NOTICE, *AGAIN):
            self.ended.write_text(f"{code}\n")
        self.invitation.unlink(missing_ok=True)
        return code

    def invite_once(self) -> None:
        """Invite the other pods, where there are any, as soon as the job is there."""
        self.inviting = self.inviting and not self.invite()

    def invite(self) -> bool:
        """Leave an invitation for the other pods; return whether the job was there to invite."""
        each = ("--uses", "0", "--expires", "never")  # Each pod, and each that comes for one.
        words = [
            *self.perdure,
            "node",
            "invite",
            self.spec.name,
            "--out",
            str(self.invitation),
            *each,
        ]
        with contextlib.suppress(subprocess.TimeoutExpired):
            done = subprocess.run(words, env=self.env, capture_output=True, timeout=_CALL_S)
            return done.returncode == 0
        return False

    def write_placement(self) -> str:
        """Write where the bus listens and the first node is reached; return the file."""
        path = self.place / "placement.json"
        path.write_bytes(msgspec.json.encode({"bind": self.address, "addresses": [self.address]}))
        return str(path)

    def join(self) -> int:
        """Be a node of the job for as long as there is one; return the exit code."""
        words = [
            *(*self.perdure, "node", "join", str(self.invitation), "--address", self.address),
            *("--grace", f"{self.grace_s:g}", "--wait", "60", "--cwd", self.spec.cwd),
        ]
        while True:
            text = read(self.invitation)
            if not text:
                if self.told:
                    return LEFT_ON_NOTICE
                if read(self.ended):
                    return 0
                time.sleep(_POLL_S)
                continue
            code = self.attend(subprocess.Popen(words, env=self.env), text)
            if self.told:
                return LEFT_ON_NOTICE
            if read(self.ended) or (code == 0 and self.is_left(text)):
                return 0
            time.sleep(_POLL_S)

    def is_left(self, text: bytes) -> bool:
        """Return whether this node alone was left, and not with its job's first pod.

        `perdure node join` ends with 0 for both. Were the pod to succeed where the first is only on
        its way to another machine, nothing would ever bring this node back.
        """
        until_s = time.monotonic() + self.settle_s
        while time.monotonic() < until_s and not self.told:
            if read(self.ended):
                return True
            if read(self.invitation) != text:
                return False
            time.sleep(_POLL_S)
        return not self.told

    def attend(self, process: "subprocess.Popen[bytes]", text: bytes) -> int:
        """Wait for `perdure node join`, ending it where the invitation is another by now."""

        def look() -> None:
            if self.told or read(self.invitation) in (b"", text):
                return
            say("the job's first pod is another one: joins it")
            for patience_s in (2.0, _CALL_S):  # The second leaves at once.
                process.send_signal(signal.SIGTERM)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(patience_s)
            process.kill()

        return follow(process, self.told, {}, look)


def read_pod_role(environ: dict[str, str]) -> str:
    """Return whether this pod is the `first` or a `node`: as told, or by its index."""
    told = environ.get("PERDURE_POD_ROLE", "")
    return told or ("first" if environ.get("JOB_COMPLETION_INDEX", "0") == "0" else "node")


def decide_code(code: int, state: str, told: bool) -> int:
    """Return the exit code of the first pod: that of `perdure run`, or that it is to come again.

    A job that was stopped on a notice is not done, although `perdure run` leaves with 0.
    """
    return LEFT_ON_NOTICE if told and state != "done" else code


def check_gpus(wanted: str) -> str:
    """Return why a real product on each GPU fails; empty where it does not."""
    words = [sys.executable, "-P", "-c", _PROBE, wanted]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=_PROBE_S)
    except subprocess.TimeoutExpired:
        return f"no product in {_PROBE_S:g} s"
    return last_line(done.stderr, f"exit code {done.returncode}") if done.returncode else ""


def read(path: Path) -> bytes:
    """Return a file's content; empty where there is none yet."""
    try:
        return path.read_bytes()
    except OSError:
        return b""


def main() -> int:
    """Be one pod; return its exit code."""
    config = Path(CONFIG_DIR, "job.json")
    pod = Pod(msgspec.json.decode(config.read_bytes(), type=JobSpec), dict(os.environ), config)
    pod.told = hear(signal.SIGTERM)
    wanted = os.environ.get("PERDURE_POD_GPUS", "")
    if wanted and (trouble := check_gpus(wanted)):
        say(f"error: [K8S6] {trouble}: limits of the pod, the runtime class of the node")
        return POD_UNFIT
    try:
        return pod.run()
    except OSError as error:
        say(f"error: {error}")
        return POD_UNFIT


if __name__ == "__main__":
    sys.exit(main())
