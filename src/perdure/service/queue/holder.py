"""A holder: carries out one attempt of a queue's item, and writes down how it ended.

It is the parent of the command and outlives the runner. Before anything is started it makes the
attempt's claim, which only one process can; whoever is second leaves. The command waits at a gate
until its own pid is in the claim, so that no command ever runs that a later runner cannot find.
"""

import contextlib
import fcntl
import os
import signal
import sys
import time
from pathlib import Path
from typing import NoReturn

import msgspec
from setproctitle import setproctitle

from perdure.adapters.host import end_leftovers, read_boot_id, read_start_time
from perdure.failpoints import failpoint
from perdure.files.rotation import rotate_file
from perdure.model.codec import encode
from perdure.model.errors import PlatformError
from perdure.model.queue import Attempt, Claim, Ending, Item
from perdure.service.agent.logs import LOOK_S
from perdure.service.jobfiles import keep_trying, read_document, write_document
from perdure.service.queue.store import (
    ATTEMPT,
    CLAIM,
    ENDING,
    OUTPUT,
    create_once,
    list_missing_outputs,
)

GRACE_S = 60.0
"""Between SIGTERM and SIGKILL when an attempt is stopped or has run out of time: room for a
checkpoint."""
GRACE_THERE_S = 330.0
"""The same for a job elsewhere: `perdure stop` waits so long for its answer, and ends by itself."""
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
CPU_SLOT = "cpu-"


def main(folder: str) -> int:
    """Carry out the attempt described in `folder`; return 0, also where another one does."""
    place = Path(folder)
    given = read_document(str(place / ATTEMPT), Attempt)
    if given is None:
        _say(f"no {place / ATTEMPT}")
        return 2
    signal.pthread_sigmask(signal.SIG_BLOCK, {*_SIGNALS, signal.SIGCHLD})
    claim = Claim(
        boot_id=read_boot_id(), holder=os.getpid(), holder_start=read_start_time(os.getpid())
    )
    try:
        if not create_once(place / CLAIM, claim):
            return 0
    except PlatformError as error:  # The runner has another holder try it.
        _say(error.message)
        return error.exit_code
    failpoint("queue/claimed", given.item.name)
    setproctitle(f"perdure holder {given.item.name} attempt {given.attempt}")
    with contextlib.ExitStack() as locks:
        try:
            ending = Ending(at_s=time.time(), reason="stopped")
            if take_devices(given, locks):
                ending = _carry_out(given, place, claim)
        except (OSError, PlatformError) as error:
            ending = Ending(at_s=time.time(), reason=f"cannot be started: {error}")
        # Nobody else knows how it ended.
        keep_trying(lambda: create_once(place / ENDING, ending), _say)
    return 0


def _say(line: str) -> None:
    print(f"perdure: error: {line}", file=sys.stderr, flush=True)


def locate_locks() -> Path:
    """Return where a machine's GPUs are locked: by queues, and by jobs launched onto it."""
    return Path(os.path.expanduser("~/.perdure-locks"))


def take_devices(given: Attempt, locks: contextlib.ExitStack) -> bool:
    """Lock the attempt's GPUs, waiting for whoever else has them; False where it was stopped."""
    folder = locate_locks()
    for slot in sorted(given.slots):
        if slot.startswith(CPU_SLOT):
            continue
        folder.mkdir(parents=True, exist_ok=True)
        file = open(folder / f"{slot}.lock", "wb")  # noqa: SIM115
        locks.enter_context(file)
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if signal.sigtimedwait(_SIGNALS, 1.0):
                    return False
    return True


def _carry_out(given: Attempt, place: Path, claim: Claim) -> Ending:
    item = given.item
    marks = {"PERDURE_QUEUE": str(place.parents[2]), "PERDURE_QUEUE_ITEM": item.name}
    # What an earlier attempt has left must not run beside this one.
    end_leftovers({}, marks, timeout_s=10.0)
    gate, opened = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(opened)
        _become(given, place, marks, gate)
    os.close(gate)
    failpoint("queue/forked", item.name)
    claim = msgspec.structs.replace(claim, child=child, child_start=read_start_time(child))
    write_document(str(place / CLAIM), claim)
    os.write(opened, b"!")
    os.close(opened)
    failpoint("queue/begun", item.name)
    status, reason = _wait(child, item, marks, str(place / OUTPUT))
    failpoint("queue/ended", item.name)
    code, number = (
        (0, os.WTERMSIG(status)) if os.WIFSIGNALED(status) else (os.WEXITSTATUS(status), 0)
    )
    missing = list_missing_outputs(item) if not (code or number or reason) else ()
    return Ending(at_s=time.time(), code=code, signal=number, reason=reason, missing=missing)


def _become(given: Attempt, place: Path, marks: dict[str, str], gate: int) -> NoReturn:
    """Turn this forked process into the command, once the gate is open."""
    item = given.item
    try:
        os.setsid()
        output = os.open(place / OUTPUT, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.closerange(output, output + 1)
        env = {
            **os.environ,
            "PERDURE_HOME": given.home,
            **make_device_variables(given.slots),
            **item.env,
        }
        env |= {**marks, "PERDURE_QUEUE_ATTEMPT": str(given.attempt)}
        env["PATH"] = env.get("PATH", os.defpath)
        if os.read(gate, 1) != b"!":
            os._exit(1)  # The holder is dead, and nobody knows of us.
        os.chdir(item.cwd)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        command = make_command(item, place)
        os.execvpe(command[0], command, env)
    except OSError as error:
        os.write(2, f"perdure: error: cannot start {item.command}: {error}\n".encode())
        os._exit(127 if isinstance(error, FileNotFoundError) else 126)


def make_command(item: Item, place: Path) -> list[str]:
    """Return the command line of an item; a job's document is written beside its claim."""
    if item.job is None:
        return list(item.command)
    path = place / "job.json"
    path.write_bytes(encode(item.job))
    words = ["run", "-c", str(path), "--name", item.name]
    if item.on:
        words = ["launch", str(path), "--on", item.on, "--attach"]
    return [sys.executable, "-P", "-m", "perdure", *words]


def make_device_variables(slots: tuple[str, ...]) -> dict[str, str]:
    """Return the environment that shows an attempt its GPUs and no others."""
    gpus = [slot for slot in slots if not slot.startswith(CPU_SLOT)]
    return {"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {}


def _wait(child: int, item: Item, marks: dict[str, str], output: str) -> tuple[int, str]:
    """Return the child's wait status, and why it was ended from here, if it was.

    Meanwhile what it writes to the file `output` is kept to a bounded size.
    """
    started, reason, deadline = time.monotonic(), "", 0.0
    looked_s = started
    grace_s = GRACE_THERE_S if item.on else GRACE_S
    while True:
        pid, status = os.waitpid(child, os.WNOHANG)
        now = time.monotonic()
        if pid:
            if reason:
                end_leftovers({}, marks, timeout_s=10.0)
            return status, reason
        if now - looked_s >= LOOK_S:
            looked_s = now
            with contextlib.suppress(OSError):  # It goes on as it is.
                rotate_file(output)
        if not reason and item.timeout_s and now - started > item.timeout_s:
            reason, deadline = f"ran out of time ({item.timeout_s:g} s)", now + grace_s
            _signal_group(child, signal.SIGTERM)
        elif reason and now > deadline:
            _signal_group(child, signal.SIGKILL)
        got = signal.sigtimedwait({*_SIGNALS, signal.SIGCHLD}, 0.5)
        if got is not None and got.si_signo != signal.SIGCHLD and not reason:
            reason, deadline = "stopped", time.monotonic() + grace_s
            _signal_group(child, signal.SIGTERM)


def _signal_group(child: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, number)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
