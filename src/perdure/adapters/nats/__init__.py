"""The one door to NATS: the server as a child process, the bus, and the journal's stream."""

from perdure.adapters.nats.bus import NatsBus
from perdure.adapters.nats.server import NatsServer, find_binary, server_config
from perdure.adapters.nats.stream import NatsStream

__all__ = ["NatsBus", "NatsServer", "NatsStream", "find_binary", "server_config"]
