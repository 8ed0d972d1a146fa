"""Invitations to machines from elsewhere: each has an end, and serves whom it was first used by."""

import hashlib

import msgspec

from perdure.model.event import Event

EXPIRES_S = 3600.0
"""For how long an invitation may be used for the first time, where nobody says otherwise."""
KEPT_MAX = 1000
"""Invitations of a job; the oldest that serve nobody any more are forgotten first."""


def digest_secret(secret: str) -> str:
    """Return what the journal holds of an invitation's secret: its SHA-256, in hexadecimal."""
    return hashlib.sha256(secret.encode("utf-8", "backslashreplace")).hexdigest()


class InvitationMade(Event, frozen=True, kw_only=True):
    """An operator (or a launcher) has invited machines. The secret itself is nowhere but there."""

    id: str
    digest: str
    """Of the secret, by `digest_secret`."""
    at_s: float
    until_s: float = 0.0
    """When it can be used for the first time no more; 0: never."""
    uses: int = 1
    """Machines that it serves; 0: as many as there are places."""
    who: str = ""
    machines: dict[str, str] = msgspec.field(default_factory=dict)
    """Machine -> its host, of those that have used it in an earlier run of the job."""


class InvitationUsed(Event, frozen=True, kw_only=True):
    """A machine was given a place for it. It is that machine's from now on."""

    id: str
    machine: str
    host: str
    node: int
    at_s: float


class InvitationRevoked(Event, frozen=True, kw_only=True):
    """Nobody comes by it any more, whoever has used it before included."""

    id: str
    at_s: float
    who: str = ""
