"""What keeps a rank's processes together, and what the process table says of one."""

import contextlib
import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36

_libc = ctypes.CDLL(None, use_errno=True)


def set_subreaper() -> None:
    """Become the parent of every descendant whose own parent dies.

    Raises:
        OSError: the kernel does not know of it (before Linux 3.4).
    """
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with(parent: int, number: signal.Signals = signal.SIGKILL) -> None:
    """Have this process be killed when the thread of `parent` that has started it has ended.

    With another signal than SIGKILL it is asked to leave.

    The kernel's signal is lost across a set-uid exec, and a parent that is gone already sends
    nothing: then this process ends here.
    """
    _prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        os._exit(1)


SITE_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2)
"""What schedulers send before a walltime, to `perdure run` or to every process of a job."""
RELAYS = {signal.SIGRTMIN + 1: signal.SIGUSR1, signal.SIGRTMIN + 2: signal.SIGUSR2}
"""Signal to a keeper -> what it passes on to its ranks."""


def ignore_site_signals() -> None:
    """Ignore SIGUSR1 and SIGUSR2 in this process, without Python's knowledge.

    Libraries such as Lightning install no handler if Python says that the signal is ignored.
    """
    for number in SITE_SIGNALS:
        _libc.signal(ctypes.c_int(number), ctypes.c_void_p(1))


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def set_title(title: str) -> None:
    """Show `title` over the command line, as much of it as fits, where that can be done.

    Not over the environment as well: SPT_NOENV keeps /proc/PID/environ readable.
    """
    with contextlib.suppress(ImportError):
        os.environ["SPT_NOENV"] = "1"
        import setproctitle

        shown = title.encode("utf-8", "backslashreplace").decode()
        setproctitle.setproctitle(shown)
    os.environ.pop("SPT_NOENV", None)
