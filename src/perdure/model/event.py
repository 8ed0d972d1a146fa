"""What every event is."""

import msgspec


class Event(msgspec.Struct, frozen=True, tag=True, kw_only=True, omit_defaults=True):
    """Base of all events."""
