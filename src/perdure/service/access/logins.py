"""Logins of machines from elsewhere, ended while the job runs.

A node's login is as old as the job's server, and whoever took it keeps it. Ending one is giving it
another password: the server cuts off who came by the old one, and the node's next machine is given
the new one. Only the supervisor has the servers; it is asked by a file in the folder of
credentials, which nobody but their owner can write to.
"""

import contextlib
import os
import time
from collections.abc import Callable, Sequence
from secrets import token_urlsafe

import msgspec

from perdure.adapters.nats import NatsServer
from perdure.model.bus.access import user_name
from perdure.model.codec import decode
from perdure.model.errors import PerdureError, PlatformError
from perdure.model.paths import JobPaths
from perdure.service.jobfiles import load_endpoint, write_document

_ANSWER_S = 10.0
_POLL_S = 0.05


def end_logins(paths: JobPaths, nodes: Sequence[int]) -> None:
    """Have the supervisor of a running job end the logins of `nodes`; return once it has.

    Raises:
        ConfigError: there is no such login.
        PlatformError: it does not, or not in time.
    """
    asked = _asked(paths)
    before = [load_endpoint(paths, user_name("agent", node)).token for node in nodes]
    deadline = time.monotonic() + _ANSWER_S
    try:
        write_document(asked, list(nodes), mode=0o600)
        while os.path.exists(asked):
            if time.monotonic() > deadline:
                raise PlatformError(
                    f"the logins of nodes {', '.join(map(str, nodes))} were not ended in time",
                    hint="`perdure run` does it: is it alive? perdure ps",
                )
            time.sleep(_POLL_S)
    finally:  # Nobody waits for it any more.
        _remove(asked)
    after = [load_endpoint(paths, user_name("agent", node)).token for node in nodes]
    if any(old == new for old, new in zip(before, after, strict=True)):
        raise PlatformError(
            "not all logins were ended, or not wholly",
            hint=f"`perdure run` says why, also in {paths.logs}; the same command tries again",
        )


def end_asked(paths: JobPaths, servers: Sequence[NatsServer], reload: Callable[[], None]) -> str:
    """End the logins that somebody has asked to end, if any; return what came of it, or nothing.

    `reload` has the servers read their configurations again. Whatever is in the place of the
    request, and whatever the disk does, is told and never raised.
    """
    asked = _asked(paths)
    try:
        nodes = _read(asked)
        if nodes is None:
            return ""
        try:
            renew_logins(paths, servers, nodes)
        finally:
            reload()  # What was written holds, also where not all could be.
        told = f"logins are ended, as asked: of nodes {', '.join(map(str, nodes))}"
    except (PerdureError, OSError) as error:
        told = f"logins are not ended, or not wholly: {error}"
    _remove(asked)
    return told


def renew_logins(paths: JobPaths, servers: Sequence[NatsServer], nodes: Sequence[int]) -> None:
    """Give the logins of `nodes` other passwords, in force once the servers read them again.

    The servers are first: where not everything can be written, a login is rather ended without a
    next one than the other way round, and to ask again mends it.

    Raises:
        ConfigError: there is no such login; nothing has changed.
        PlatformError: a file cannot be written.
    """
    renewed = {
        name: msgspec.structs.replace(load_endpoint(paths, name), token=token_urlsafe(24))
        for name in (user_name("agent", node) for node in nodes)
    }
    for server in servers:
        before = server.users
        for name, endpoint in renewed.items():
            server.set_password(name, endpoint.token)
        try:
            server.write_config()
        except PlatformError:
            server.users = before
            raise
    for name, endpoint in renewed.items():
        write_document(paths.credential(name), endpoint, mode=0o600)


def _read(asked: str) -> list[int] | None:
    """Return the nodes of a request; None where there is none."""
    try:
        with open(asked, "rb") as file:
            nodes: list[int] = decode(file.read(), list[int])
    except FileNotFoundError:
        return None
    return nodes


def _remove(asked: str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(asked)


def _asked(paths: JobPaths) -> str:
    return os.path.join(os.path.dirname(paths.credential("run")), "end-logins.json")
