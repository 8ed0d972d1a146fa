"""Locks that are free in a forked child.

A fork copies a lock as it is. If another thread of the rank held it, no thread of the child ever
releases it. A rank forks in the middle of everything: the loaders of its data, a script's own
processes. perdure's own state in the child is cut off from the parent's, so it needs no repair.
"""

import os
import weakref
from typing import Any, TypeVar

AnyLock = TypeVar("AnyLock")
_locks: "weakref.WeakSet[Any]" = weakref.WeakSet()


def free_in_child(lock: AnyLock) -> AnyLock:
    """Return `lock`, a lock, condition, or event, which nobody holds in a forked child."""
    _locks.add(lock)
    return lock


def _free_all() -> None:
    for lock in list(_locks):
        lock._at_fork_reinit()


os.register_at_fork(after_in_child=_free_all)
