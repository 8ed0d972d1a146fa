"""Where the bus of a job is: a module of its own, since every command that reads a job needs it.

What goes over the bus (`wire`) imports all events and orders.
"""

import msgspec

from perdure.model.bus.version import Spoken


class Endpoint(msgspec.Struct, frozen=True):
    """How one part of a job finds the bus, with what that part may do there.

    `endpoint.json` is the operator's, `credentials/USER.json` that of the others; each is readable
    by its owner only.
    """

    url: str
    """URL of the server."""
    token: str
    """Password of `user`; without one, a token."""
    clock_offset_s: float
    """Job time = CLOCK_MONOTONIC of this boot + this, for every part on this machine."""
    external: bool = False
    """The NATS server is the user's own (`--nats URL`)."""
    user: str = ""
    """Such as `operator` or `agent-0`."""
    ca: str = ""
    """PEM of the authority that has signed the server's certificate; empty: the system's."""
    creds: str = ""
    """Path of the user's own credentials (`--nats-creds`)."""
    tls_cert: str = ""
    """Path of the certificate that is shown to the user's own server; with `tls_key`."""
    tls_key: str = ""
    owner: int = -1
    """User (uid) of a server that is perdure's own and on loopback; -1: any."""
    speaks: Spoken = Spoken()
    """What the job's controller speaks."""
