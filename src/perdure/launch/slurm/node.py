"""A step's only task on a node: keeps the agent up there.

    python -m perdure.launch.slurm.node MARK AGENT...

Slurm ends all of a step with its task, so an agent that died would take keeper and ranks along.
This task outlives it and starts the next one, which takes over from the keeper.

Slurm's TERM goes to every step as well, on a preemption a GraceTime before it reaches the batch
script. The task passes it on to that script's program as the file MARK and stays, so that all ranks
can save and stop at one agreed step; then the agent leaves. What does not, Slurm kills.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from perdure.launch.runs import exit_code

RESTARTS_MAX = 30
_PAUSE_S = 0.05


def main(mark: str, command: list[str]) -> int:
    """Keep `command` up until it leaves with 0; return its last exit code.

    It was put together by another Python, which a container may not have: this one takes its place.
    """
    command = [sys.executable, *command[1:]]
    env = dict(os.environ)
    if _is_elsewhere(env):
        # `perdure run` is on another machine: what goes with it here is Slurm's own daemon, and
        # this machine's monotonic clock counts from another moment.
        env["PERDURE_RUN_PID"] = str(os.getppid())
        env["PERDURE_CLOCK_OFFSET_S"] = repr(time.time() - time.monotonic())

    def hear(number: int, frame: object) -> None:
        with contextlib.suppress(OSError):
            Path(mark).touch()

    signal.signal(signal.SIGTERM, hear)
    code = 1
    for _ in range(RESTARTS_MAX):
        code = subprocess.Popen(command, env=env).wait()
        if code == 0:
            break
        time.sleep(_PAUSE_S)
    return exit_code(code)


def _is_elsewhere(env: dict[str, str]) -> bool:
    """Return whether the job's own process is not on this machine."""
    try:
        with open(f"/proc/{env['PERDURE_RUN_PID']}/cmdline", "rb") as file:
            return b"perdure" not in file.read()
    except (OSError, KeyError):
        return True


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
