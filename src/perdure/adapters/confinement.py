"""A process, and all that it starts, held to some folders by the kernel: Landlock.

What is written elsewhere is refused with EACCES, whoever asks, root among them; reading is as
before. No right is needed for it. It does not hold back what changes no content (modes, times),
what goes out by a network, and what another process outside writes for it.
Source: Documentation/userspace-api/landlock.rst of the kernel.
"""

import contextlib
import ctypes
import os
import struct
from collections.abc import Iterable

_CREATE, _ADD, _RESTRICT = 444, 445, 446
"""System calls; the same numbers on every architecture."""
_VERSION_FLAG = 1
_PATH_BENEATH = 1
_PR_SET_NO_NEW_PRIVS = 38
ABI_MIN = 2
"""From which on files may be renamed between folders that may be written."""
_WRITE = 1 << 1 | sum(1 << bit for bit in range(4, 13))
"""Write a file; remove and make files, folders, sockets, devices and links."""
_REFER, _TRUNCATE = 1 << 13, 1 << 14
ABI_TRUNCATE = 3

_libc = ctypes.CDLL(None, use_errno=True)


def read_abi() -> int:
    """Return which version of Landlock this kernel has; 0 where it has none."""
    return max(0, int(_libc.syscall(_CREATE, None, 0, _VERSION_FLAG)))


def can_confine() -> bool:
    """Return whether this kernel can hold a process to folders."""
    return read_abi() >= ABI_MIN


class Confinement:
    """The folders that a process may write in; it begins where `enter` is called."""

    def __init__(self, folders: Iterable[str]) -> None:
        """Allow these folders, and what lies in them; those that are not there are passed over.

        Raises:
            OSError: the kernel cannot do it.
        """
        abi = read_abi()
        if abi < ABI_MIN:
            raise OSError(f"Landlock {abi}: {ABI_MIN} is needed (Linux 5.19)")
        rights = _WRITE | _REFER | (_TRUNCATE if abi >= ABI_TRUNCATE else 0)
        attributes = struct.pack("=Q", rights)
        self._fd = _check(_libc.syscall(_CREATE, attributes, len(attributes), 0))
        try:
            for folder in folders:
                with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                    self._allow(folder, rights)
        except BaseException:
            self.close()
            raise

    def _allow(self, folder: str, rights: int) -> None:
        place = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            rule = struct.pack("=Qi", rights, place)
            _check(_libc.syscall(_ADD, self._fd, _PATH_BENEATH, rule, 0))
        finally:
            os.close(place)

    def enter(self) -> None:
        """Hold this process to the folders from now on, and what it starts; for good.

        Raises:
            OSError: the kernel refuses.
        """
        one, zero = ctypes.c_ulong(1), ctypes.c_ulong(0)
        _check(_libc.prctl(_PR_SET_NO_NEW_PRIVS, one, zero, zero, zero))
        _check(_libc.syscall(_RESTRICT, self._fd, 0))

    def close(self) -> None:
        """Give the descriptor back; who has entered stays confined."""
        os.close(self._fd)


def _check(result: int) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return int(result)
