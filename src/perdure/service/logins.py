"""Logins of machines from elsewhere, ended while the job runs.

A node's login is as old as the job's server, and whoever took it keeps it. Ending one is giving it
another password: the server cuts off who came by the old one, and the node's next machine is given
the new one. Only the supervisor has the servers; it is asked by a file in the folder of
credentials, which nobody but their owner can write to.
"""

import contextlib
import os
import time
from collections.abc import Sequence
from secrets import token_urlsafe

import msgspec

from perdure.adapters.nats import NatsServer
from perdure.model.access import user_name
from perdure.model.errors import PlatformError
from perdure.model.paths import JobPaths
from perdure.service.jobfiles import load_endpoint, read_document, write_document

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
    write_document(asked, list(nodes), mode=0o600)
    deadline = time.monotonic() + _ANSWER_S
    while os.path.exists(asked):
        if time.monotonic() > deadline:
            raise PlatformError(
                f"the logins of nodes {', '.join(map(str, nodes))} were not ended in time",
                hint="`perdure run` does it: is it alive? perdure ps",
            )
        time.sleep(_POLL_S)
    after = [load_endpoint(paths, user_name("agent", node)).token for node in nodes]
    if any(old == new for old, new in zip(before, after, strict=True)):
        raise PlatformError("the logins were not ended", hint=f"see {paths.logs}")


def find_asked(paths: JobPaths) -> list[int]:
    """Return the nodes whose logins are to be ended."""
    return read_document(_asked(paths), list[int]) or []


def renew_logins(paths: JobPaths, servers: Sequence[NatsServer], nodes: Sequence[int]) -> None:
    """Give the logins of `nodes` other passwords, in force once the servers read them again.

    Raises:
        ConfigError: there is no such login.
        PlatformError: a file cannot be written.
    """
    for node in nodes:
        name, password = user_name("agent", node), token_urlsafe(24)
        endpoint = msgspec.structs.replace(load_endpoint(paths, name), token=password)
        for server in servers:
            server.set_password(name, password)
        write_document(paths.credential(name), endpoint, mode=0o600)
    for server in servers:
        server.write_config()


def answer_asked(paths: JobPaths) -> None:
    """Tell who has asked that it is done."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(_asked(paths))


def _asked(paths: JobPaths) -> str:
    return os.path.join(os.path.dirname(paths.credential("run")), "end-logins.json")
