"""Which process group listens on which port, noted beside the ring for whoever looks at sockets.

gloo opens, for each process group in each rank, a device of its own: one listening socket, and
connections that either came in through it or go to a peer's. A connection from outside shows its
ports but not its group, so the rank says which listener appeared while which group was formed.
The note is a small JSON object, port -> name, replaced whole; it costs one look at the rank's
descriptors a group and nothing afterwards.

`_new_process_group_helper` is private to torch. Should a later one not have it, or form groups
otherwise, groups stay without names and nothing else changes.
"""

import contextlib
import functools
import json
import os
from typing import Any

from perdure.files import replace_file
from perdure.model.ring import P2P_SUFFIX
from perdure.worker.system.sockets import borrow, is_listener, list_sockets

_DEFAULT_S = {"gloo": 1800.0, "nccl": 600.0}
"""torch's own time-outs, for a group whose options cannot be read."""
_LONGEST_S = 10 * 365 * 86400.0
SUFFIX = ".groups"
"""The note's path is the ring's with this behind it."""


def note_groups(ring_path: str) -> bool:
    """Note each process group formed from now on; False where this torch has no such place."""
    from torch.distributed import distributed_c10d as c10d

    form = getattr(c10d, "_new_process_group_helper", None)
    if form is None:
        return False
    if hasattr(form, "_perdure_note"):
        return True
    pid = os.getpid()
    ports: dict[int, str] = {}

    @functools.wraps(form)
    def noting(*args: Any, **kwargs: Any) -> Any:
        mine = os.getpid() == pid  # The file belongs to the process that made it, and to no fork.
        before = list_listening() if mine else set()
        result = form(*args, **kwargs)
        with contextlib.suppress(Exception):  # Whatever is wrong with a note: the group is formed.
            group = result[0] if isinstance(result, tuple) else result
            name = c10d._world.pg_names.get(group, "")
            if name and mine:
                listening = list_listening()
                for port in set(ports) - listening:
                    del ports[port]
                ports.update(dict.fromkeys(listening - before, name))
                replace_file(ring_path + SUFFIX, json.dumps(ports).encode())
        return result

    noting._perdure_note = True  # type: ignore[attr-defined]
    c10d._new_process_group_helper = noting
    return True


def read_group_timeout_s(name: str) -> float:
    """Return the time-out of the process group called `name`, the longest of its backends'.

    torch ends a collective that takes longer, so that nobody else needs to be quicker. 0 where
    it cannot be told.
    """
    found = [0.0]
    with contextlib.suppress(Exception):  # Private to torch, and changed under our eyes.
        for group, _, _ in _list_groups(name.removesuffix(P2P_SUFFIX)):
            if hasattr(group, "_get_backend"):
                found += [
                    _read_timeout_s(group._get_backend(device)) for device in group._device_types
                ]
    return max(found)


def read_members(name: str) -> tuple[int, tuple[int, ...]]:
    """Return size and global ranks of the process group called `name`; (0, ()) if unknown."""
    with contextlib.suppress(RuntimeError, AttributeError):  # Changed under our eyes.
        for group, _, ranks in _list_groups(name):
            return group.size(), ranks
    return 0, ()


def list_process_groups() -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return description and global ranks of each process group of this process, by name."""
    return {
        name: (str(group.group_desc), tuple(sorted(ranks))) for group, name, ranks in _list_groups()
    }


def _list_groups(called: str | None = None) -> list[tuple[Any, str, tuple[int, ...]]]:
    """Return the groups, or those with one name: each with its name and global ranks.

    A group that was made past `torch.distributed`, as torchft does, is called nothing at all (""),
    and is not among them.
    """
    from torch.distributed import distributed_c10d as c10d

    world = c10d._world
    return [
        (group, name, tuple(world.pg_group_ranks.get(group, {})))
        for group, name in list(world.pg_names.items())
        if called is None or name == called
    ]


def _read_timeout_s(backend: Any) -> float:
    timeout = getattr(getattr(backend, "options", None), "_timeout", None)
    if timeout is None:
        return _DEFAULT_S.get(str(backend.name()).lower(), 0.0)
    return min(max(float(timeout.total_seconds()), 0.0), _LONGEST_S)


def list_listening() -> set[int]:
    """Return the TCP ports on which this process listens by sockets that do not block."""
    ports = set()
    for fd in list_sockets():
        with contextlib.suppress(OSError), borrow(fd) as sock:  # gloo's do not block.
            if is_listener(sock):
                ports.add(int(sock.getsockname()[1]))
    return ports
