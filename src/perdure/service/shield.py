"""Keep signals of a site from a program that has handlers of its own for them: nats-server."""

import ctypes
import os
import signal
import struct

from perdure.worker.system.process import ignore_site_signals

_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP = 38, 22
_RT_SIGACTION = {"x86_64": 13, "aarch64": 134}
_DONE, _ALLOW = 0x00050000, 0x7FFF0000
_libc = ctypes.CDLL(None)


def _make_filter(number: int) -> bytes:
    """Return a program for the kernel that answers 0 if call `number` is for such a signal."""
    rows = (
        (0x20, 0, 0, 0),  # Load the number of the call.
        (0x15, 0, 4, number),  # Another one is allowed.
        (0x20, 0, 0, 16),  # Load its first argument, the signal.
        (0x15, 1, 0, int(signal.SIGUSR1)),
        (0x15, 0, 1, int(signal.SIGUSR2)),
        (0x06, 0, 0, _DONE),
        (0x06, 0, 0, _ALLOW),
    )
    return b"".join(struct.pack("=HBBI", *row) for row in rows)


_number = _RT_SIGACTION.get(os.uname().machine)
_code = ctypes.create_string_buffer(_make_filter(_number or 0))
_program = struct.pack("@HP", 7, ctypes.addressof(_code))


def refuse_site_handlers() -> None:
    """Ignore SIGUSR1 and SIGUSR2 in the program that is executed next, whatever it asks for.

    nats-server ends by SIGUSR2, and Go installs its handlers although a signal is ignored. A
    kernel that takes no filter leaves the program as it is.
    """
    ignore_site_signals()
    if _number is not None:
        _libc.prctl(_PR_SET_NO_NEW_PRIVS, ctypes.c_ulong(1), 0, 0, 0)
        _libc.prctl(_PR_SET_SECCOMP, ctypes.c_ulong(2), _program, 0, 0)
