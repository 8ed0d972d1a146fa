"""From a forked image to a script's first line, as if Python had just started it.

What a script can see is what `python SCRIPT` would show: `__main__`, `sys.argv`, `sys.path[0]`,
streams, environment, session, random state, exceptions, exit code, atexit handlers, modules.
`docs/torchrun.md` lists the differences that stay.
"""

import contextlib
import importlib
import io
import os
import pkgutil
import random
import runpy
import signal
import sys
import threading
import time
import types
from collections.abc import Mapping
from importlib.machinery import SourceFileLoader, SourcelessFileLoader
from pathlib import Path

from perdure.failpoints import failpoint
from perdure.files import replace_file
from perdure.keeper.execution import make_cold_command
from perdure.keeper.modules import ModuleStore
from perdure.keeper.zygote import ForkRanks
from perdure.model.bus.wire import RankLaunch
from perdure.worker.start.cold import attach
from perdure.worker.start.failure import leave_without_device, save_failure
from perdure.worker.start.imports import record_imports
from perdure.worker.start.streams import open_streams, reopen_input
from perdure.worker.system.process import SITE_SIGNALS, die_with, set_title
from perdure.worker.system.stderr import say

_REPARENT_S = 20.0


def run_rank(plan: ForkRanks, launch: RankLaunch, go: int, store: ModuleStore) -> None:
    """Become rank `launch` of `plan` and run the script; raises whatever ends it."""
    os.setsid()
    open_streams(launch.stdout, launch.stderr, launch.stdin)
    if launch.stdin:
        reopen_input()
    os.environ.clear()
    os.environ.update(launch.env)
    title = f"perdure rank {plan.job} g{plan.generation} r{launch.rank}: "
    set_title(title + " ".join((os.path.basename(plan.script), *plan.args)))
    leave_image(go, plan.keeper)
    failpoint("rank/begin")
    try:
        os.chdir(plan.cwd)
    except OSError as error:
        raise SystemExit(f"perdure: {error.strerror}: {plan.cwd}") from None
    reset_process()
    bound = unbind(store)
    attach()
    if launch.rank == plan.ranks[0].rank and plan.imports:
        where = plan.cwd if plan.module else os.path.dirname(os.path.realpath(plan.script))
        record_imports(plan.imports, where)
    hide_modules(plan, launch, title, store, bound)
    run_main(
        plan.script,
        plan.args,
        module=plan.module,
        traceback_file=plan.traceback_files.get(launch.rank, ""),
    )


def hide_modules(
    plan: ForkRanks, launch: RankLaunch, title: str, store: ModuleStore, bound: set[int] | None
) -> None:
    """Show the script only modules that a fresh Python has, and the others once it asks for them.

    A script that needs another module than the image has, where none can take its place, is
    executed cold from its first line on. Once it has torch, it may have begun to train: then the
    image's module stays, and perdure says so. With torch, the rank is bound to the CPUs `bound`, if
    there are any.
    """

    def note_visible(name: str) -> None:
        if name == "torch":
            cpus = os.sched_getaffinity(0)
            if bound is not None:
                os.sched_setaffinity(0, bound)
            set_threads(os.environ, store, cpus)
        elif name == "torch.distributed":
            read_level = getattr(sys.modules[name], "set_debug_level_from_env", None)
            if read_level is not None:  # By the script's own TORCH_DISTRIBUTED_DEBUG.
                read_level()

    def decide_cold(reason: str) -> None:
        if "torch" in sys.modules or threading.current_thread() is not threading.main_thread():
            with contextlib.suppress(OSError):
                replace_file(plan.why_cold, reason.encode())
            say(f"{reason}; this life keeps the module of the warm image, and the next starts cold")
            return
        go_cold(reason)

    def go_cold(reason: str) -> None:
        with contextlib.suppress(OSError):
            replace_file(plan.why_cold, reason.encode())
        say(f"the script starts again, cold: {reason}")
        program, command, env = make_cold_command(
            plan,
            launch,
            title=title,
            traceback_file=plan.traceback_files.get(launch.rank, ""),
            imports=plan.imports,
        )
        os.chdir(plan.cwd)
        signal.pthread_sigmask(signal.SIG_BLOCK, SITE_SIGNALS)  # Until the cold rank ignores them.
        for number in SITE_SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        os.execve(program, command, env)

    try:
        store.hide(on_visible=note_visible, on_unequal=decide_cold)
    except Exception as error:
        go_cold(f"the warm image cannot be hidden: {error!r}")


def leave_image(go: int, keeper: int) -> None:
    """Wait until all siblings are forked and the keeper is the parent; die with the keeper."""
    if os.read(go, 1) != b"g":
        os._exit(1)  # A sibling could not be forked: none of them runs.
    os.close(go)
    deadline = time.monotonic() + _REPARENT_S
    while os.getppid() != keeper:
        if time.monotonic() > deadline:
            os._exit(1)
        time.sleep(0.0005)
    die_with(keeper)


def reset_process() -> None:
    """Undo what siblings of one image share and processes of their own would not."""
    importlib.invalidate_caches()
    sys.path_importer_cache.clear()
    threading.main_thread()._set_native_id()  # type: ignore[attr-defined]
    random.seed()
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed()
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.default_generator.seed()  # torch.seed() would go on to CUDA.
    tempfile = sys.modules.get("tempfile")
    if tempfile is not None:
        tempfile.__dict__.update(_name_sequence=None, tempdir=None)
    logging = sys.modules.get("logging")
    if logging is not None:  # Its records say how old they are; the image is older.
        now = time.time_ns() if isinstance(logging.__dict__["_startTime"], int) else time.time()
        logging.__dict__["_startTime"] = now
    process = sys.modules.get("multiprocessing.process")
    if process is not None:
        process.__dict__["ORIGINAL_DIR"] = os.getcwd()
        process.current_process().authkey = os.urandom(32)


def unbind(store: ModuleStore) -> set[int] | None:
    """Undo what an import of torch in the image did to its CPUs, and return those.

    Return None if it did nothing, or if somebody else has changed the image's CPUs since.
    """
    bound = os.sched_getaffinity(0)
    if bound != store.bound or bound == store.cpus:
        return None
    try:
        os.sched_setaffinity(0, store.cpus)
    except OSError:  # A cgroup has taken them all away.
        return None
    return bound


def set_threads(environ: Mapping[str, str], store: ModuleStore, cpus: set[int]) -> None:
    """Give torch and OpenBLAS the number of threads that a cold start on `cpus` would."""
    import torch

    threads = _read_count(environ, "OMP_NUM_THREADS")
    changed = any(_read_count(environ, name) != _read_count(store.counts, name)
                  for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"))  # fmt: skip
    if changed or cpus != store.cpus:
        count = _read_count(environ, "MKL_NUM_THREADS") or threads or len(cpus)
        if torch._C.has_mkl and environ.get("MKL_DYNAMIC", "").upper() != "FALSE":
            count = min(count, _count_cores())
        if torch.get_num_threads() != count:
            torch.set_num_threads(count)
    threads = threads or len(os.sched_getaffinity(0))
    _set_openblas_threads(_read_count(environ, "OPENBLAS_NUM_THREADS") or threads)


def _read_count(environ: Mapping[str, str], name: str) -> int:
    """Return the number that a variable begins with; 0 if that is none, or no number of threads."""
    first = environ.get(name, "").partition(",")[0].strip()
    return int(first) if first.isdecimal() else 0


def _count_cores() -> int:
    """Return the number of cores of this machine, more than which MKL never uses."""
    folder = "/sys/devices/system/cpu"
    with contextlib.suppress(OSError):
        siblings = {
            Path(folder, name, "topology/thread_siblings_list").read_bytes()
            for name in os.listdir(folder)
            if name[3:].isdecimal()
        }
        return len(siblings)
    return os.cpu_count() or 1


def _set_openblas_threads(count: int) -> None:
    """Undo the image's OPENBLAS_NUM_THREADS=1 in each copy of the library that is loaded."""
    if count == 1:
        return
    import ctypes

    with open("/proc/self/maps") as file:
        paths = {line.split(maxsplit=5)[-1].strip() for line in file if "openblas" in line}
    for path in sorted(paths):
        with contextlib.suppress(OSError):
            library = ctypes.CDLL(path)
            for prefix in ("scipy_openblas", "openblas"):
                for suffix in ("64_", "_64", ""):
                    setter = getattr(library, f"{prefix}_set_num_threads{suffix}", None)
                    if setter is not None:
                        setter(count)


def run_main(script: str, args: tuple[str, ...], *, module: bool, traceback_file: str) -> None:
    """Run `script` as `__main__`; raises SystemExit or KeyboardInterrupt for the interpreter.

    An exception is shown here, without the frames below the script's, and ends in exit code 1;
    the interpreter does the rest as ever: threads, atexit, streams. It does none of it where the
    device is lost, which has an exit code of its own. What a script says by `sys.exit("why")` is
    kept as an exception is.
    """
    main = types.ModuleType("__main__")
    main.__dict__.update(
        __annotations__={}, __builtins__=sys.modules["builtins"], __package__=None, __spec__=None
    )
    sys.modules["__main__"] = main
    sys.argv[:] = [script, *args]  # Modules of the image have this list.
    sys.orig_argv = [sys.executable, "-u", *(["-m"] if module else []), script, *args]
    try:
        if module:
            importlib.import_module("runpy")  # Python's own `-m` needs it before the module.
            _set_path(os.getcwd())
            sys.argv[0] = "-m"
            runpy._run_module_as_main(script)  # type: ignore[attr-defined]
        else:
            _run_path(script, main)
    except SystemExit as leaving:
        if traceback_file and not isinstance(leaving.code, int | None):  # It says why.
            save_failure(traceback_file, leaving, _trim_traceback(leaving))
        raise
    except BaseException as error:
        _end_by(error, traceback_file)


def _run_path(script: str, main: types.ModuleType) -> None:
    path = os.path.join(os.getcwd(), script)  # `link/..` may be elsewhere: Python shortens nothing.
    if os.path.isdir(path) or _is_archive(path):
        importlib.import_module("runpy")
        _set_path(path)
        runpy._run_module_as_main("__main__", alter_argv=False)  # type: ignore[attr-defined]
        return
    try:
        with io.open_code(path) as file:
            code = pkgutil.read_code(file)
        if code is None:
            with io.open_code(path) as file:
                source = file.read()
    except OSError as error:
        what = f"can't open file {path!r}: [Errno {error.errno}] {error.strerror}"
        print(f"{sys.executable}: {what}", file=sys.stderr)
        raise SystemExit(2) from None
    _set_path(os.path.dirname(os.path.realpath(path)))
    main.__file__ = path
    main.__dict__["__cached__"] = None
    loader = SourceFileLoader if code is None else SourcelessFileLoader
    main.__loader__ = loader("__main__", path)
    if code is None:
        code = compile(source, path, "exec", dont_inherit=True)
        del source
    exec(code, main.__dict__)


def _is_archive(path: str) -> bool:
    return os.path.isfile(path) and not isinstance(
        pkgutil.get_importer(path), (types.NoneType, importlib.machinery.FileFinder)
    )


def _set_path(first: str) -> None:
    if not sys.flags.safe_path:
        sys.path.insert(0, first)


def _trim_traceback(error: BaseException) -> types.TracebackType | None:
    """Return the traceback of `error` without the frames below the script's."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_globals.get("__name__") == __name__:
        trace = trace.tb_next
    return trace


def _end_by(error: BaseException, traceback_file: str) -> None:
    """Show `error` as the interpreter would and leave as it would."""
    trace = error.__traceback__ = _trim_traceback(error)
    if traceback_file:
        save_failure(traceback_file, error, trace)
    kind = type(error)
    sys.last_type, sys.last_value, sys.last_traceback = kind, error, trace
    try:
        sys.excepthook(kind, error, trace)
    except SystemExit:
        raise
    except BaseException as second:
        own = second.__traceback__
        second.__traceback__ = own.tb_next if own else None
        second.__context__ = None
        print("Error in sys.excepthook:", file=sys.stderr)
        sys.__excepthook__(type(second), second, second.__traceback__)
        print("\nOriginal exception was:", file=sys.stderr)
        sys.__excepthook__(kind, error, trace)
    if isinstance(error, KeyboardInterrupt):
        # The interpreter ends by SIGINT itself, after its handlers; it need not show it again.
        sys.excepthook = lambda *_: None
        raise error
    leave_without_device(error)
    raise SystemExit(1)
