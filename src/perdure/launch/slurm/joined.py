"""The program of a Slurm job that is one further node of another job: it invites itself, and joins.

    python -m perdure.launch.slurm.joined PLACE JOB NAME GRACE

It waits for the other job's bus, whose files are on the file system that all nodes share, and
becomes `perdure node join`. NAME is the machine that it is to the controller: under the same name
it gets the place that it had. USR1, as Slurm sends it before the walltime, is a notice of GRACE
seconds from then on; before, it ends this program, which has nothing to lose.
"""

import os
import subprocess
import sys
import time
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from perdure.launch.runs import locate_own_job, say
from perdure.launch.slurm.batch import (
    Chain,
    is_loopback,
    read_route_address,
    resolve_address,
    wait_for_predecessor,
)
from perdure.launch.slurm.client import locate_nodes
from perdure.model.errors import PlatformError

_PERDURE = (sys.executable, "-P", "-m", "perdure")
_WAIT_S = 600.0
_AGAIN_S = 1.0
_CALL_S = 60.0


class _Server(msgspec.Struct):
    url: str


class _Invitation(msgspec.Struct):
    endpoint: _Server


def main(place: str, job: str, name: str, grace: str) -> int:
    """Become `perdure node join`; return an exit code where there is nothing to join.

    Raises:
        PlatformError: the job gives no invitation in time.
    """
    home = Path(locate_nodes(os.environ["PERDURE_HOME"], job), name)
    home.mkdir(parents=True, exist_ok=True)
    wait_for_predecessor(locate_own_job(job, str(home)))
    invitation = wait_invitation(job)
    server = msgspec.json.decode(invitation, type=_Invitation).endpoint.url
    chain = msgspec.json.decode(Path(place, "chain.json").read_bytes(), type=Chain)
    options, words = chain.container.expand()
    step = [*chain.list_step_words(), *options] if options else []
    python = [chain.container.python, *_PERDURE[1:]] if chain.container.python else _PERDURE
    command = [
        *step,
        *words,
        *python,
        "node",
        "join",
        "-",
        "--wait",
        f"{_WAIT_S:g}",
        "--grace",
        grace,
    ]
    if address := find_address(urlsplit(server).hostname or ""):
        command += ["--address", address]
    reading, writing = os.pipe()
    os.write(writing, invitation)
    os.close(writing)
    os.dup2(reading, 0)
    say(f"joins {job} as {name}")
    os.environ["PERDURE_HOME"] = str(home)
    os.execvp(command[0], command)


def wait_invitation(job: str) -> bytes:
    """Return an invitation to the job, once it has a bus.

    Raises:
        PlatformError: it has none in time.
    """
    deadline = time.monotonic() + _WAIT_S
    while True:
        try:
            done = subprocess.run(
                [*_PERDURE, "node", "invite", job],
                capture_output=True,
                timeout=_CALL_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            why = "no answer"
        else:
            if done.returncode == 0:
                return done.stdout
            why = done.stderr.decode(errors="replace").strip()
        if time.monotonic() > deadline:
            raise PlatformError(f"no invitation to {job}: {why}", hint=f"perdure status {job}")
        time.sleep(_AGAIN_S)


def find_address(server: str) -> str:
    """Return where the other nodes reach this one; empty where all are on this machine."""
    if is_loopback(server):
        return ""
    own = resolve_address(os.environ.get("SLURMD_NODENAME", ""))
    return own if own and not is_loopback(own) else read_route_address(server)


if __name__ == "__main__":
    try:
        sys.exit(main(*sys.argv[1:5]))
    except PlatformError as error:
        say(f"error: {error}; {error.hint}")
        sys.exit(error.exit_code)
