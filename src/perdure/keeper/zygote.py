"""The warm image: torch imported once, ranks and stores forked from it.

It runs no operator and never asks CUDA anything, has one thread, and proves all of that before
it is used (a child of it must survive a multi-threaded operator); what it cannot prove it says,
and the keeper starts ranks cold. Modules that earlier ranks imported are imported beforehand,
unless one starts a thread, opens a device, or reads at import which rank it is.

A rank is forked by a child that ends at once, which makes the keeper, as subreaper, its parent.

An image that is to import more than another has is forked from it, so that only what is new has to
be imported. It stays its child until the other is ended, and a mistake in it harms nobody.
"""

import contextlib
import functools
import gc
import importlib
import os
import re
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterable, Iterator

import msgspec

from perdure.failpoints import failpoint
from perdure.files.private import locate_job
from perdure.keeper.footprint import Footprint, PatchWatch, find_obstacle
from perdure.keeper.modules import ModuleLog, ModuleStore
from perdure.model.bus.wire import KeeperSpawn, KeeperStore
from perdure.model.codec import decode, encode
from perdure.model.input.raw import restore_spawn
from perdure.worker.start.imports import list_installed_folders
from perdure.worker.start.streams import open_streams, survive_full_disks
from perdure.worker.system.process import SITE_SIGNALS, ignore_site_signals, set_title
from perdure.worker.system.stderr import say

FORK_TIMEOUT_S = 30.0

BASE = (
    "numpy",
    "torch",
    "torch.distributed",
    "torch.nn.parallel",
    "torch.optim",
    "torch.utils.data",
    "perdure.keeper.bootstrap",
    "perdure.worker.store",
)
"""What every image imports."""

OWN = (
    "perdure.worker.attach",
    "perdure.worker.run",
    "perdure.worker.checkpoint",
    "perdure.worker.data",
    "perdure.worker.native.preload",
    "perdure.worker.start.unloadable",
    "perdure.worker.torchft.listening",
    "perdure.worker.torchft.manager",
    "encodings.idna",
    "torch.profiler._cupti_monitor",
    "torch.utils.serialization",
)
"""perdure's parts inside a rank, and what torch imports in training."""

KEPT = frozenset({
    "logging", "multiprocessing.process", "numpy", "tempfile", "torch", "torch._dynamo",
    "torch.distributed", "torch.distributed.distributed_c10d", "torch.distributed.rendezvous",
    "torch.utils.data.dataloader",
})  # fmt: skip
"""Modules that perdure looks for in `sys.modules` while a rank starts."""

RANK_VARIABLES = frozenset({
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK",
    "MASTER_ADDR", "MASTER_PORT", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK",
})  # fmt: skip

_OF_PROCESS = frozenset({"getpid", "mkdtemp", "random", "secrets", "urandom", "uuid1", "uuid4"})
"""Names of what is another in each process."""


class Preload(msgspec.Struct, frozen=True, tag=True):
    """First message to an image: import `names`, then prove yourself."""

    names: tuple[str, ...]


class ForkRanks(KeeperSpawn, frozen=True, kw_only=True, tag=True):
    """Fork the ranks of a generation, as the keeper was told to start them."""

    job: str
    keeper: int
    traceback_files: dict[int, str]
    imports: str
    """Where the first of `ranks` writes what it imported."""
    why_cold: str
    """Where a rank that cannot be warm writes the reason, for the starts after it."""


class ForkStore(KeeperStore, frozen=True, kw_only=True, tag=True):
    """Fork a store."""

    job: str
    keeper: int


class ForkImage(msgspec.Struct, frozen=True, tag=True):
    """Fork an image that serves the socket which comes with this message."""


class ImageForked(msgspec.Struct, frozen=True, tag=True):
    """First message of an image that was forked from another."""

    pid: int


class Importing(msgspec.Struct, frozen=True, tag=True):
    """Said before each import, so that a crash has a name."""

    name: str


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The image may be used."""

    modules: frozenset[str]
    """Names of what it has imported."""


class Unfit(msgspec.Struct, frozen=True, tag=True):
    """Says that the image may not fork; `blamed` are packages without which it may."""

    reason: str
    blamed: dict[str, str] = {}


class RanksForked(msgspec.Struct, frozen=True, tag=True):
    """Global rank -> pid."""

    generation: int
    pids: dict[int, int]


class StoreForked(msgspec.Struct, frozen=True, tag=True):
    """A store serves `port`."""

    generation: int
    pid: int
    port: int


class ForkFailed(msgspec.Struct, frozen=True, tag=True):
    """Says that a fork has failed: nothing runs, or what did was told to leave."""

    generation: int
    reason: str


ToImage = Preload | ForkImage | ForkRanks | ForkStore
FromImage = ImageForked | Importing | Ready | Unfit | RanksForked | StoreForked | ForkFailed


def main(job: str, node: int, fd: int, log: ModuleLog) -> None:
    """Serve the keeper at the other end of `fd`; in a forked rank, run its script and return."""
    ignore_site_signals()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SITE_SIGNALS)
    survive_full_disks()  # Before anything is imported that might keep the streams.
    with log:  # It imports.
        set_title(f"perdure zygote {job} {node}")
    run_child = Image(socket.socket(fileno=fd), log).serve()
    if run_child is not None:
        run_child()


class Image:
    """Imports, proves, forks."""

    def __init__(self, sock: socket.socket, log: ModuleLog) -> None:
        """Talk over `sock`, blocking: there is nothing else to do meanwhile."""
        self._sock, self._log = sock, log
        self._store = ModuleStore(log)
        self._received: list[int] = []
        """Files that have come with messages."""

    def serve(self) -> Callable[[], None] | None:
        """Return None when the keeper is gone, and in each forked child what it has to do."""
        for line in self._read_lines():
            message: ToImage = decode(line, ToImage)
            if isinstance(message, Preload):
                self._send(self._prepare(message.names))
            elif isinstance(message, ForkImage):
                if self._fork_image():
                    return self.serve()
            elif (child := self._fork(message)) is not None:
                return child
        self._store.restore()
        return None

    def _read_lines(self) -> Iterator[bytes]:
        """Yield what the keeper says, until it hangs up."""
        rest = b""
        while True:
            data, fds, _, _ = socket.recv_fds(self._sock, 1 << 16, 1, socket.MSG_CMSG_CLOEXEC)
            self._received += fds
            if not data:
                return
            *lines, rest = (rest + data).split(b"\n")
            yield from lines

    def _send(self, message: FromImage) -> None:
        self._sock.sendall(encode(message) + b"\n")

    def _prepare(self, names: Iterable[str]) -> Ready | Unfit:
        reason = find_rank_reader(self._log.fresh)
        if reason:
            return Unfit(reason)
        self._store.restore()
        with self._log:
            gc.disable()  # Collecting takes a fifth of the time of these imports, and finds little.
            for name in (*BASE, *OWN):
                reason = self._import(name)
                if reason and name in BASE:
                    return Unfit(reason)
            gc.collect()  # Else a script could see classes that only garbage has.
            gc.freeze()  # Later collections pass over what is there by now.
            gc.enable()
            reason = find_obstacle()
            if reason:
                return Unfit(reason)
            self._log.note_first()
            missing = [name for name in names if name not in sys.modules]
            blamed = self._preload(missing) if missing else {}
        if blamed:
            return Unfit("; ".join(sorted(set(blamed.values()))), blamed)
        reason = prove_fork()
        if reason:
            return Unfit(reason)
        # What the image does here, each rank would do: most of it copies pages of memory.
        locate_job("", "")
        list_installed_folders()
        self._store = ModuleStore(self._log)
        ready = Ready(frozenset(sys.modules))
        self._store.stow(KEPT)
        importlib.invalidate_caches()
        sys.path_importer_cache.clear()
        gc.collect()
        gc.freeze()
        return ready

    def _preload(self, names: Iterable[str]) -> dict[str, str]:
        blamed: dict[str, str] = {}
        unfit = ""
        patches = PatchWatch()
        for name in names:
            package = name.partition(".")[0]
            if name in sys.modules or package in blamed:
                continue
            self._log.read.clear()
            footprint = Footprint()
            self._import(name)
            before, unfit = unfit, find_obstacle()
            patch = patches.find_change(package)
            change = "" if package == "torch" else footprint.find_change() or patch
            reads = sorted(self._log.read & RANK_VARIABLES)
            if unfit and unfit != before:
                blamed[package] = f"{package} {unfit}"
            elif reads and package != "torch":
                blamed[package] = f"{package} reads {reads[0]} at import"
            elif change:
                blamed[package] = f"{package} {change} at import"
        return blamed

    def _import(self, name: str) -> str:
        """Import `name`; return why it could not be, or an empty string."""
        self._send(Importing(name))
        try:
            importlib.import_module(name)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # A module may even call sys.exit().
            return f"import {name}: {type(error).__name__}: {error}"
        return ""

    def _fork_image(self) -> bool:
        """Fork an image of what this one has; return whether this process is that one.

        Where it cannot be forked, the keeper sees its socket closed.
        """
        fd = self._received.pop(0)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:  # Forked images that have ended.
                pass
        pid = -1
        with contextlib.suppress(OSError):
            pid = os.fork()
        if pid != 0:
            os.close(fd)
            return False
        self._sock.close()
        self._sock = socket.socket(fileno=fd)
        self._send(ImageForked(os.getpid()))
        return True

    def _fork(self, message: ForkRanks | ForkStore) -> Callable[[], None] | None:
        """Fork grandchildren through a child; in them, return what they have to do."""
        answer, answer_end = os.pipe()
        go, go_end = os.pipe()
        try:
            failpoint("zygote/fork")
            middle = os.fork()
        except OSError as error:
            for fd in (answer, answer_end, go, go_end):
                os.close(fd)
            self._send(ForkFailed(message.generation, f"fork: {error.strerror}"))
            return None
        if middle == 0:
            os.close(answer)
            self._sock.close()
            if isinstance(message, ForkRanks):
                message = restore_spawn(message)
                unequal = self._store.find_unequal(find_first_folder(message))
                if unequal:
                    open_streams(message.ranks[0].stdout, message.ranks[0].stderr)
                    say(f"the script starts cold: {unequal}, which the warm image does not have")
                    os.write(answer_end, encode(ForkFailed(message.generation, unequal)))
                    os._exit(0)
                child, count = self._fork_ranks(message, go, answer_end), len(message.ranks)
            else:
                child, count = self._fork_store(message, go, answer_end), 1
            if child is not None:
                os.close(go_end)
                return child
            os.write(go_end, b"g" * count)
            os._exit(0)
        for fd in (answer_end, go, go_end):
            os.close(fd)
        said = read_answer(answer, FORK_TIMEOUT_S)
        os.close(answer)
        os.waitpid(middle, 0)
        silent = ForkFailed(message.generation, "a child between ended without a word")
        self._sock.sendall((said.encode() or encode(silent)) + b"\n")
        return None

    def _fork_ranks(self, plan: ForkRanks, go: int, answer: int) -> Callable[[], None] | None:
        pids = {}
        for launch in plan.ranks:
            pid = _fork_or_leave(answer, plan.generation)
            if pid == 0:
                os.close(answer)
                from perdure.keeper.bootstrap import run_rank

                return functools.partial(run_rank, plan, launch, go, self._store)
            pids[launch.rank] = pid
            failpoint("zygote/forked")
        failpoint("zygote/answer")
        os.write(answer, encode(RanksForked(plan.generation, pids)))
        return None

    def _fork_store(self, plan: ForkStore, go: int, answer: int) -> Callable[[], None] | None:
        read, write = os.pipe()
        pid = _fork_or_leave(answer, plan.generation)
        if pid == 0:
            os.close(answer)
            os.close(read)
            return functools.partial(_run_store, plan, go, write)
        os.close(write)
        port = read_answer(read, FORK_TIMEOUT_S)
        if not port.isdecimal():
            reason = port.removeprefix("!").strip() or "the store said nothing"
            os.write(answer, encode(ForkFailed(plan.generation, reason)))
            os._exit(1)
        os.write(answer, encode(StoreForked(plan.generation, pid, int(port))))
        return None


def find_rank_reader(names: Iterable[str]) -> str:
    """Return which of a Python's first modules is another in each rank; an empty string if none.

    Such a `sitecustomize` runs once in the image, and has to run in each rank.
    """
    for name in sorted(names):
        if "." in name or name in sys.stdlib_module_names:  # What it imports reads them later.
            continue
        text, path = "", getattr(sys.modules.get(name), "__file__", None) or ""
        with contextlib.suppress(OSError), open(path, errors="replace") as file:
            text = file.read()
        if found := (RANK_VARIABLES | _OF_PROCESS).intersection(re.findall(r"\w+", text)):
            return f"{name} uses {min(found)} when Python starts"
    return ""


def find_first_folder(spawn: KeeperSpawn) -> str:
    """Return the folder that Python puts first on the path of a script or module."""
    if spawn.module:
        return spawn.cwd
    script = os.path.realpath(os.path.join(spawn.cwd, spawn.script))
    return script if os.path.isdir(script) else os.path.dirname(script)


def _fork_or_leave(answer: int, generation: int) -> int:
    """Fork; where it fails say why and end, so that children forked before see no `go`."""
    try:
        return os.fork()
    except OSError as error:
        os.write(answer, encode(ForkFailed(generation, f"fork: {error.strerror}")))
        os._exit(1)


def _run_store(plan: ForkStore, go: int, answer: int) -> None:
    from perdure.keeper.bootstrap import leave_image
    from perdure.worker.store import open_store, wait_for_ever

    os.setsid()
    which = "standby" if plan.generation < 0 else f"g{plan.generation}"
    set_title(f"perdure store {plan.job} {which}")
    store = open_store(plan.bind, plan.world_size, answer)
    leave_image(go, plan.keeper)
    wait_for_ever(store)


def read_answer(fd: int, timeout_s: float) -> str:
    """Return what comes through the pipe `fd` until its end, or until `timeout_s` has passed."""
    data = b""
    deadline = time.monotonic() + timeout_s
    while select.select([fd], [], [], max(0.0, deadline - time.monotonic()))[0]:
        part = os.read(fd, 1 << 16)
        if not part:
            break
        data += part
    return data.decode()


def prove_fork() -> str:
    """Return why a child cannot use torch; an empty string if a multi-threaded operator ended."""
    import torch

    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            torch.set_num_threads(2)
            total = torch.ones(1 << 17).mul_(2).sum().item()
            os.write(write, b"ok" if total == 1 << 18 else b"! wrong sum")
        finally:
            os._exit(0)
    os.close(write)
    text = read_answer(read, 20.0)
    os.close(read)
    if text != "ok":
        os.kill(pid, 9)
    os.waitpid(pid, 0)
    return "" if text == "ok" else f"an operator in a forked child did not end {text}".strip()
