"""How many messages were set aside and values dropped, from whom, and what the first was."""

from collections.abc import Iterable, Mapping

import msgspec

from perdure.model.events import JournalEntry, MessagesSetAside
from perdure.model.plain import make_plain
from perdure.telemetry.curves import UNREADABLE, DroppedCount

ROWS_MAX = 64
_OTHERS = "others"


class AsideRow(msgspec.Struct, frozen=True):
    """What was set aside at one door, of one source."""

    door: str
    source: str
    count: int
    first_s: float
    last_s: float
    reason: str
    """Why the first of them could not be read."""
    example: str
    """The beginning of the first of them."""


_DROPPED = "values of run.log: no numbers, or too many or too large"
_UNREAD = "lines or files of curves that cannot be read, or could not be written"


def list_asides(
    entries: Iterable[JournalEntry], dropped: Mapping[str, DroppedCount] | None = None
) -> tuple[AsideRow, ...]:
    """Return a row for each door and source, the first one first; of very many, some together.

    Below them stands what of `run.log` was `dropped`.
    """
    rows: dict[tuple[str, str], AsideRow] = {}
    for entry in entries:
        note = entry.body
        if not isinstance(note, MessagesSetAside) or not note.count:
            continue
        key = (make_plain(note.door), make_plain(note.source))
        if key not in rows and len(rows) >= ROWS_MAX:
            key = (key[0], _OTHERS)
        row = rows.get(key)
        if row is None:
            reason, example = make_plain(note.reason), make_plain(note.example)
            row = AsideRow(*key, 0, entry.at_s, entry.at_s, reason, example)
        count = row.count + max(note.count, 0)
        rows[key] = msgspec.structs.replace(row, count=count, last_s=entry.at_s)
    lost = [
        AsideRow("metrics", make_plain(source), one.count, one.first_s, one.last_s,
                 _UNREAD if source == UNREADABLE else _DROPPED, "")
        for source, one in sorted((dropped or {}).items())
    ]  # fmt: skip
    return (*rows.values(), *lost)
