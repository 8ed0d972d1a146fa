"""Run a command as an ordinary user who may not trace processes.

usage: unshare --mount --propagation private python -m tests.ordinary COMMAND ...

It needs root and a mount namespace of its own. An interpreter below a folder that is closed to
others, such as /root, becomes reachable there; the rest of that folder disappears.
"""

import ctypes
import os
import platform
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.machines import ORDINARY

PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS, SECCOMP_MODE_FILTER = 22, 38, 2
LOAD_WORD, JUMP_IF_EQUAL, RETURN = 0x20, 0x15, 0x06
ALLOW, REFUSE = 0x7FFF0000, 0x00050001  # The latter answers with errno 1, EPERM.
TRACING = {
    "x86_64": (101, 310, 311, 438),
    "aarch64": (117, 270, 271, 438),
}
"""Numbers of ptrace, process_vm_readv, process_vm_writev, and pidfd_getfd."""


def mount(*words: str) -> None:
    """Run mount(8)."""
    subprocess.run(["mount", *words], check=True, timeout=60)


def open_path(path: Path) -> None:
    """Make `path` reachable for all users in this mount namespace, if a parent is closed."""
    for parent in reversed(path.parents):
        if not parent.stat().st_mode & 0o001:
            aside = tempfile.mkdtemp()
            mount("--bind", str(path), aside)
            mount("-t", "tmpfs", "-o", "mode=755", "tmpfs", str(parent))
            path.mkdir(parents=True)
            mount("--bind", aside, str(path))
            return


def refuse_tracing() -> None:
    """Answer system calls that trace a process with EPERM, in this process and its children."""
    numbers = TRACING[platform.machine()]
    program = [struct.pack("HBBI", LOAD_WORD, 0, 0, 0)]  # The number of the system call.
    for index, number in enumerate(numbers):
        program.append(struct.pack("HBBI", JUMP_IF_EQUAL, len(numbers) - index, 0, number))
    program.append(struct.pack("HBBI", RETURN, 0, 0, ALLOW))
    program.append(struct.pack("HBBI", RETURN, 0, 0, REFUSE))
    code = ctypes.create_string_buffer(b"".join(program))
    head = ctypes.create_string_buffer(
        struct.pack("HxxxxxxP", len(program), ctypes.addressof(code))
    )
    libc = ctypes.CDLL(None, use_errno=True)
    for words in (
        (PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0),
        (PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(head), 0, 0),
    ):
        if libc.prctl(*words) != 0:
            raise OSError(ctypes.get_errno(), "prctl failed")


def main() -> None:
    """Drop all rights and run the command that the arguments name."""
    root = Path(__file__).resolve().parent.parent
    for path in (root, Path(sys.base_prefix).resolve()):
        open_path(path)
    os.setgroups([])
    user, group = ORDINARY
    os.setresgid(group, group, group)
    os.setresuid(user, user, user)
    refuse_tracing()
    os.execvp(sys.argv[1], sys.argv[1:])


if __name__ == "__main__":
    main()
