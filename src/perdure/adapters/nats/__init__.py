"""The one door to NATS: the server as a child process, the bus, and the journal's stream."""

import sys
from importlib import import_module

# nats-py imports aiohttp where there is one, for WebSockets, which perdure does not use: it is a
# quarter of a second of CPU in each of a job's processes and of every command.
if "aiohttp" not in sys.modules:
    sys.modules["aiohttp"] = None  # type: ignore[assignment]
    try:
        import_module("nats.aio.client")
    finally:
        del sys.modules["aiohttp"]

from perdure.adapters.nats.bus import NatsBus, UntrustedError
from perdure.adapters.nats.certificates import (
    make_authority,
    make_certificate,
    make_shared_certificate,
)
from perdure.adapters.nats.credentials import choose_file, read_credentials, read_pem
from perdure.adapters.nats.server import (
    NatsServer,
    User,
    find_binary,
    server_config,
)
from perdure.adapters.nats.stream import NatsStream

__all__ = [
    "NatsBus",
    "NatsServer",
    "NatsStream",
    "UntrustedError",
    "User",
    "choose_file",
    "find_binary",
    "make_authority",
    "make_certificate",
    "make_shared_certificate",
    "read_credentials",
    "read_pem",
    "server_config",
]
