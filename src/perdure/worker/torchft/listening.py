"""Where the servers of a torchft rank listen: at its node's address alone.

torchft listens on every interface, and advertises the host's own name. Its checkpoint server sends
the state of the model without asking for a password. On Debian and Ubuntu a host's own name is
127.0.1.1, at which no other node is.
"""

import os
import socket
import sys
from types import ModuleType
from typing import Any


def listen_at_node(torchft: ModuleType) -> None:
    """Bind the servers of torchft's managers to this node's address, and advertise that."""
    address = os.environ.get("PERDURE_NODE_ADDRESS", "") or "127.0.0.1"
    _place_manager(sys.modules["torchft.manager"], address)
    _place_transport(sys.modules["torchft.checkpointing.http_transport"], address)


def _place_manager(manager: Any, address: str) -> None:
    make = manager.ManagerServer

    def serve(*args: Any, hostname: str, bind: str, **named: Any) -> Any:
        if hostname in (address, socket.gethostname()):  # Another name is the script's choice.
            hostname, bind = address, f"{address}:{bind.rpartition(':')[2]}"
        return make(*args, hostname=hostname, bind=bind, **named)

    manager.ManagerServer = serve


def _place_transport(transport: Any, address: str) -> None:
    class Server(transport._IPv6HTTPServer):  # type: ignore[misc]
        address_family = socket.AF_INET6 if ":" in address else socket.AF_INET

        def __init__(self, server_address: tuple[str, int], handler: Any) -> None:
            super().__init__((address, server_address[1]), handler)

    tell = transport.HTTPTransport.address

    def tell_address(self: Any) -> str:
        found: str = tell(self)
        return found.replace(f"//{socket.gethostname()}:", f"//{address}:", 1)

    transport._IPv6HTTPServer = Server
    transport.HTTPTransport.address = tell_address
