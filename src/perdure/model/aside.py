"""What could not be read and was set aside, so that what lies behind it in a queue goes on."""

from perdure.model.codec import make_encodable
from perdure.model.event import Event

TEXT_MAX = 200
"""Characters of a reason and of an example."""


class MessagesSetAside(Event, frozen=True, kw_only=True):
    """Messages that could not be read (or may not be said) were acknowledged and dropped.

    It is journaled in the place of an event whose number has to be taken by something, and beside
    the stream at a bounded rate, as a count of what came since the last one.
    """

    at_s: float
    door: str
    """Where: `rank`, `ring`, `keeper`, `order`, `event`, `heartbeat`, `command`, `journal`."""
    source: str
    """From whom, as far as that is known."""
    count: int = 1
    """0: numbers that nobody will fill, of messages that are counted elsewhere."""
    reason: str = ""
    """Why the first of them could not be read."""
    example: str = ""
    """The beginning of the first of them, printable."""


def make_plain(text: str | bytes, limit: int = TEXT_MAX) -> str:
    """Return the first `limit` characters of `text` on one line, with all else escaped."""
    if isinstance(text, bytes):
        text = text[: 4 * limit].decode("utf-8", "backslashreplace")
    plain = "".join(
        each if each.isprintable() else each.encode("unicode_escape").decode()
        for each in make_encodable(text[:limit])
    )
    return plain if len(text) <= limit and len(plain) <= limit else plain[: limit - 1] + "…"
