"""What a drill runs on a box itself, beside the job, with the Python and the variables of it.

    python -P -m perdure.drill.onbox keep COMMAND ...   be the job: confined, with a watch
    python -P -m perdure.drill.onbox watch              end and remove it once nobody asks
    python -P -m perdure.drill.onbox do JSON            one `Order`; its answer is a line

A job on a box outlives the connection that has started it, and a drill's must not outlive the
drill. Whoever drills touches the file `lease` in the job's folder every few seconds; a watch that
was started before the job ends it, and removes all that is the drill's, once that has not been done
for `LEASE_S`. It does so whether the connection broke or the machine that drills has died.
"""

import contextlib
import fcntl
import os
import re
import shutil
import subprocess
import sys
import time
import zlib
from pathlib import Path
from typing import Any, Literal

import msgspec

from perdure.adapters.confinement import Confinement
from perdure.drill.copies import RunFiles
from perdure.drill.gates import Gates
from perdure.drill.isolation import clean_environ, list_writable
from perdure.drill.place import NotMadeError
from perdure.drill.planning import Act
from perdure.drill.strikes import Target
from perdure.failpoints import SWITCH
from perdure.files import is_locked
from perdure.files.private import find_private, make_private
from perdure.launch.ssh import box
from perdure.model.codec import encode
from perdure.model.errors import PlatformError
from perdure.model.job import JobSpec
from perdure.service.jobfiles import remove_folders
from perdure.service.jobfolders import paths_of

MODULE = "perdure.drill.onbox"
KEPT = "drill.json"
"""In the folder `launch` of a drill's job: how it is kept. By it a drill's folder is known."""
LEASE, FULL = "lease", "full"
"""In that folder as well. While the second is there, no checkpoint can be written."""
LEASE_S = 60.0
_LOOK_S = 1.0
_ABANDONED_S = 1800.0
"""What nobody has touched for so long is no drill's that is being prepared."""
_REMOVE_S = 15.0
_OWN = re.compile(r"[A-Za-z0-9_.-]+-drill-[0-9a-f]{6}(\+[A-Za-z0-9_.-]+)?")


class Kept(msgspec.Struct, frozen=True, kw_only=True):
    """How a drill's job is kept on a box."""

    confined: bool
    writable: tuple[str, ...] = ()
    """Folders outside in which the script may write."""
    switches: bool = False
    """Whether its checkpoints can be refused."""


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that is to be done or looked up beside the job."""

    what: Literal["strike", "heal", "ask", "losses", "began", "words", "end", "clean", "sweep"]
    act: Act | None = None
    lead: int = -1
    """A fault of a rank is made so many steps from now; negative: at once."""
    verb: str = ""
    args: dict[str, Any] = {}
    timeout_s: float = 20.0
    generation: int = -1


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What became of an order."""

    error: str = ""
    """Why it could not be carried out."""
    value: Any = None


class _Place:
    """The folders of one job of a drill on this box."""

    def __init__(self, job: str, durable: str, home: str, credentials: str) -> None:
        self.job, self.durable = Path(job), Path(durable)
        self.home, self.credentials = home, credentials
        self.launch = self.job / "launch"
        short = f"drill-{zlib.crc32(str(self.job).encode()):08x}"  # Sockets have short paths.
        self.temporary = Path(find_private("/tmp"), short)

    @classmethod
    def of_environ(cls) -> "_Place":
        """Return the place that this job's `env.sh` tells of."""
        env = os.environ
        return cls(
            env["JOB_DIR"], env["DURABLE_DIR"], env["PERDURE_HOME"], env.get("CRED_FILE", "")
        )

    def read_spec(self) -> JobSpec:
        """Return the job's document."""
        return msgspec.json.decode((self.launch / "job.json").read_bytes(), type=JobSpec)


class _RunOnBox(RunFiles):
    """The job's run, which the box's supervisor has started."""

    @property
    def root(self) -> int:
        """Return the process of `perdure run`; 0 where it is gone."""
        start = box.read(str(self.log.parent), "start.json") or {}
        pid = int(start.get("child", 0))
        alive = pid > 0 and box.start_time(pid) == start.get("child_start")
        return pid if alive and start.get("boot_id") == box.boot_id() else 0


def main(argv: list[str]) -> int:
    """Do one of the above; return the exit code."""
    place = _Place.of_environ()
    match argv:
        case ["keep", *command]:
            return keep(place, command)
        case ["watch"]:
            if os.fork() == 0:
                os.setsid()
                watch(place)
            return 0
        case ["do", text]:
            answer = carry_out(place, msgspec.json.decode(text, type=Order))
            print(box.ANSWER + encode(answer).decode())
            return 0
    print(__doc__, file=sys.stderr)
    return 2


def keep(place: _Place, command: list[str]) -> int:
    """Become the job's own process: held to the drill's folders, watched from outside."""
    kept = msgspec.json.decode((place.launch / KEPT).read_bytes(), type=Kept)
    place.durable.mkdir(mode=0o700, parents=True, exist_ok=True)
    for folder in (place.temporary.parent, place.temporary):
        make_private(str(folder))
    (place.launch / LEASE).touch()
    # Its own parent ends at once: what is below the job would end with it.
    subprocess.run(
        [sys.executable, "-P", "-m", MODULE, "watch"], check=True, stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    environ = clean_environ(os.environ, place.temporary)
    if kept.switches:
        environ[SWITCH] = f"checkpoint/written=error(ENOSPC),file={place.launch / FULL}"
    if kept.confined:
        own = [place.job, place.durable, place.temporary.parent]
        caches = list_writable(environ, place.read_spec())
        for cache in caches:  # A fresh box has none yet, and the script could not make it.
            with contextlib.suppress(OSError):
                os.makedirs(cache, exist_ok=True)
        outside = [*caches, *kept.writable]
        Confinement([*map(str, own), *outside]).enter()
    os.execvpe(command[0], command, environ)


def watch(place: _Place) -> None:
    """End and remove a job that nobody asks after any more.

    So is one whose folder is gone: either all of it has just been removed, or its script has done
    that, and still runs.
    """
    null = os.open(os.devnull, os.O_RDWR)
    for fd in range(3):
        os.dup2(null, fd)
    with contextlib.suppress(BlockingIOError):
        with contextlib.suppress(FileNotFoundError):
            _wait_unasked(place)
        clean(place)


def _wait_unasked(place: _Place) -> None:
    """Wait until nobody asks after a job, for which it is watched.

    Raises:
        BlockingIOError: it is watched already.
        FileNotFoundError: its folder is gone.
    """
    with os.fdopen(_lock_watch(place.launch)):
        touched, since_s = 0.0, time.monotonic()
        while time.monotonic() < since_s + LEASE_S:
            try:
                newest = os.stat(place.launch / LEASE).st_mtime
            except FileNotFoundError:
                raise
            except OSError:  # A disk that is not there for a while: nobody is heard.
                newest = touched
            if newest != touched:
                touched, since_s = newest, time.monotonic()
            time.sleep(_LOOK_S)


def _lock_watch(launch: Path) -> int:
    """Return a descriptor by which a job is watched.

    Raises:
        BlockingIOError: it is already.
        OSError: there is no such folder, or no lock can be had.
    """
    lock = os.open(launch / "watch.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        raise
    return lock


def is_watched(launch: Path) -> bool:
    """Return whether a drill's job is watched now, whatever its files and clocks tell."""
    return is_locked(launch / "watch.lock")


def clean(place: _Place) -> list[str]:
    """End all that a drill's job has here, and remove it; return what is left.

    Nothing is touched that is not named as a drill's.
    """
    if not _OWN.fullmatch(place.job.name) or not _OWN.fullmatch(place.durable.name):
        return [f"{place.job} is no folder of a drill"]
    box.take({"folder": str(place.launch), "home": place.home})
    for job in Path(place.home, "jobs").glob("*"):
        remove_folders(paths_of(place.home, job.name))
    if place.credentials.endswith(f"-{place.job.name}"):
        Path(place.credentials).unlink(missing_ok=True)
    folders = [place.job, place.durable, place.temporary]
    deadline_s = time.monotonic() + _REMOVE_S  # Another box may write on a disk that both see.
    while True:
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)
        left = [str(folder) for folder in folders if folder.exists()]
        if not left or time.monotonic() > deadline_s:
            return left
        time.sleep(0.2)


def sweep(place: _Place) -> list[str]:
    """Remove what drills have left on this box whose watch has died as well, as by a reboot."""
    removed = []
    lease = place.launch / LEASE
    lease.touch()
    now_s = lease.stat().st_mtime  # By the clock of that disk, which may be another machine's.
    for kept in place.job.parent.glob(f"*-drill-*/launch/{KEPT}"):
        folder = kept.parents[1]
        times = [os.stat(path).st_mtime for path in (kept, kept.parent / LEASE) if path.exists()]
        if folder == place.job or not times or now_s < max(times) + _ABANDONED_S:
            continue
        if is_watched(kept.parent):
            continue
        name = folder.name.partition("+")[0]
        durable = place.durable.parent / name
        home = durable / ("state" if name == folder.name else f"nodes/{folder.name}")
        credentials = place.credentials.removesuffix(place.job.name) + folder.name
        if not clean(_Place(str(folder), str(durable), str(home), credentials)):
            removed.append(folder.name)
    return removed


def carry_out(place: _Place, order: Order) -> Answer:
    """Return what became of an order."""
    if order.what == "clean":
        left = clean(place)
        return Answer(error=f"not removed: {', '.join(left)}" if left else "")
    if order.what == "end":
        return Answer(value=box.take({"folder": str(place.launch), "home": place.home}))
    if order.what == "sweep":
        return Answer(value=sweep(place))
    spec = place.read_spec()
    run = _RunOnBox(spec.name, Path(place.home), place.launch / "run.out")
    run.own = place.durable
    target = Target(run, place.launch / FULL, Gates(run.paths))
    try:
        return Answer(value=_do(target, spec, order))
    except (NotMadeError, PlatformError, OSError) as error:
        return Answer(error=str(error) or type(error).__name__)


def _do(target: Target[_RunOnBox], spec: JobSpec, order: Order) -> Any:
    run = target.run
    match order.what:
        case "losses":
            return run.read_losses()
        case "began":
            return run.read_began(spec, order.generation)
        case "words":
            return run.tail(), run.was_refused()
        case "ask":
            return target.ask(order.verb, order.args, order.timeout_s)
    assert order.act is not None
    if order.what == "heal":
        return target.heal(order.act)
    seen = run.look()
    if seen is None:
        raise NotMadeError("the job has no status")
    return target.strike(order.act, seen, seen.step + order.lead if order.lead >= 0 else -1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
