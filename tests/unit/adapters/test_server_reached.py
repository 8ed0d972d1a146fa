"""Why a server of the job is not reached."""

from pathlib import Path

from perdure.adapters.host import pick_free_ports
from perdure.adapters.nats.server import NatsServer


def test_a_server_that_is_not_reached_says_where_and_why(tmp_path: Path) -> None:
    """As where the loopback interface is down: the server itself says that it is ready."""
    (port,) = pick_free_ports("127.0.0.1", 1)
    server = NatsServer(str(tmp_path), "", port=port)
    assert not server.poll_ready()
    assert server.unreached == f"127.0.0.1:{port}: Connection refused"
