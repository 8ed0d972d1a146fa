"""Processes that the keeper executes itself: cold ranks, and the image that warm ones come from."""

import os
import shutil
import signal
import socket
import sys
from collections.abc import Callable, Mapping

import perdure
from perdure.model.bus.wire import KeeperSpawn, RankLaunch
from perdure.model.nccl import SUPERVISED
from perdure.worker.start.failure import ENV as TRACEBACK
from perdure.worker.start.streams import open_streams
from perdure.worker.system.process import SITE_SIGNALS, die_with

INJECT = os.path.join(os.path.dirname(os.path.abspath(perdure.__file__)), "worker/start/inject")

_IMAGE_PROGRAM = (
    "import sys; sys.flags.safe_path or sys.path.pop(0); from perdure.keeper.entry import main; "
    "main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))"
)
"""Run by `-c`, since `-m` or `-P` would show in the `sys.flags` and modules of every rank."""

_COPIER_PROGRAM = (
    "import sys; sys.flags.safe_path or sys.path.pop(0); sys.path.append(sys.argv[1]); "
    "from perdure.keeper.copier import main; main(int(sys.argv[2]))"
)
"""Run with `-S`: the copier needs no package but perdure, and starts at once."""

_TITLE_ROOM = 200

_READ_AT_START = (
    "PYTHON", "LD_", "MALLOC_", "OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "ATEN_",
    "TORCH_", "TORCHDYNAMO", "TORCHINDUCTOR", "PYTORCH_", "HF_", "TRANSFORMERS_",
)  # fmt: skip
_READ_LATER = frozenset({"OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", *SUPERVISED})


def find_difference(image: Mapping[str, str], rank: Mapping[str, str]) -> str:
    """Return the name of a variable that was read when the image started and differs for `rank`.

    A script under such a variable is started cold; an empty string says that there is none.
    """
    differing = (name for name in _list_read(image, rank) if image.get(name) != rank.get(name))
    return next(differing, "")


def adopt_difference(image: Mapping[str, str], rank: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of the next image: `image`'s, made alike where it differs."""
    read = _list_read(image, rank)
    env = {name: value for name, value in image.items() if name not in read}
    return env | {name: value for name, value in rank.items() if name in read}


def _list_read(image: Mapping[str, str], rank: Mapping[str, str]) -> list[str]:
    """Return the variables of either that are read when an image starts."""
    names = sorted({*image, *rank} - _READ_LATER)
    return [name for name in names if name.startswith(_READ_AT_START)]


def start_image(job: str, node: int, env: Mapping[str, str]) -> tuple[int, socket.socket]:
    """Execute an image; return its pid and the keeper's end of its socket.

    Numerical libraries must not start threads at import, so they are told to use one; and a
    package that asks at import whether there is a GPU must not make a context of CUDA, which no
    fork survives: torch then asks NVML. A rank gets its own environment back.
    """
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-u", "-c", _IMAGE_PROGRAM, job, str(node), str(theirs.fileno())]
    command.append(" " * _TITLE_ROOM)  # Overwritten by the title.
    env = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1", **env, "OPENBLAS_NUM_THREADS": "1"}
    kept = theirs.fileno()

    def prepare() -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, SITE_SIGNALS)  # Until the image ignores them.
        os.set_inheritable(kept, True)
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.dup2(2, 1)

    pid = _execute(command[0], command, env, prepare)
    theirs.close()
    return pid, ours


def start_copier() -> tuple[int, socket.socket]:
    """Execute a copier of output and return its pid and the keeper's end of its socket.

    It has no variable by which a keeper's processes are found and ended: it outlives the keeper.

    Raises:
        OSError: there is no process or no socket to be had.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        kept = theirs.fileno()
        root = os.path.dirname(os.path.dirname(os.path.abspath(perdure.__file__)))
        command = [sys.executable, "-S", "-c", _COPIER_PROGRAM, root, str(kept)]
        env = {name: value for name, value in os.environ.items() if not name.startswith("PERDURE_")}
        try:
            pid = _execute(command[0], command, env, lambda: os.set_inheritable(kept, True))
        except OSError:
            ours.close()
            raise
    return pid, ours


def start_cold(
    spawn: KeeperSpawn, launch: RankLaunch, *, title: str, traceback_file: str, imports: str
) -> int:
    """Execute one rank and return its pid.

    It leads a session of its own, dies with the keeper, and reads nothing. What cannot be
    executed exits with 127 or 126, as in a shell, and says why on its standard error.
    """
    program, command, env = make_cold_command(
        spawn, launch, title=title, traceback_file=traceback_file, imports=imports
    )
    keeper = os.getpid()

    def prepare() -> None:
        os.setsid()
        open_streams(launch.stdout, launch.stderr, launch.stdin)
        os.chdir(spawn.cwd)
        die_with(keeper)

    return _execute(program, command, env, prepare)


def make_cold_command(
    spawn: KeeperSpawn, launch: RankLaunch, *, title: str, traceback_file: str, imports: str
) -> tuple[str, list[str], dict[str, str]]:
    """Return the path, arguments, and environment of a rank that is executed."""
    env = dict(launch.env)
    if spawn.no_python:
        command = [spawn.script, *spawn.args]
    else:
        what = ["-m", spawn.script] if spawn.module else [spawn.script]
        command = [sys.executable, "-u", *what, *spawn.args]
        path = env.pop("PYTHONPATH", "")  # No title can be set once the first variable has moved.
        env["PYTHONPATH"] = f"{INJECT}{os.pathsep}{path}" if path else INJECT
        env |= {"PERDURE_ATTACH": "1", "PERDURE_TITLE": title, TRACEBACK: traceback_file}
        if imports and launch.rank == spawn.ranks[0].rank:
            env["PERDURE_IMPORTS"] = imports
    program = shutil.which(command[0], path=env.get("PATH")) or command[0]
    if os.path.dirname(program):
        program = os.path.join(spawn.cwd, program)
    return program, command, env


def _execute(
    program: str, command: list[str], env: Mapping[str, str], prepare: Callable[[], None]
) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        for number in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGHUP, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        prepare()
        os.execve(program, command, dict(env))
    except OSError as error:
        what = error.filename or program
        os.write(2, f"perdure: cannot execute {what}: {error.strerror}\n".encode())
        os._exit(127 if isinstance(error, FileNotFoundError) else 126)
    finally:
        os._exit(1)


def start_failed() -> int:
    """Return the pid of a process that has failed already, in the place of one that cannot be."""
    pid = os.fork()
    if not pid:
        os._exit(1)
    return pid
