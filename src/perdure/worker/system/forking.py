"""Locks that are free in a forked child.

A fork copies a lock as it is. If another thread of the rank held the lock, no thread of the child
ever releases it. Data loaders and a script's own processes are forked at any time. The state behind
the locks needs no repair, because ring and control line drop their connection in the child.
"""

import os
import weakref
from typing import Any, TypeVar

AnyLock = TypeVar("AnyLock")
_locks: "weakref.WeakSet[Any]" = weakref.WeakSet()


def free_in_child(lock: AnyLock) -> AnyLock:
    """Register a lock, condition, or event as released in forked children, and return `lock`."""
    _locks.add(lock)
    return lock


def _free_all() -> None:
    for lock in list(_locks):
        lock._at_fork_reinit()


os.register_at_fork(after_in_child=_free_all)
