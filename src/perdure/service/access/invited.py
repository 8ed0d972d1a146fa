"""The invitations of the run before, where the door to the job's bus outlives its runs.

Who joined an earlier run comes back with its invitation (`service/access/kept_endpoint.py`). What
has become of each invitation is in that run's journal, so it is looked up there and told to the new
run's controller before anybody asks: a spent one stays spent, a revoked one is not taken over.
"""

import contextlib
import os
from typing import Any

from perdure.control.job import JobState
from perdure.control.joining import note_invitation
from perdure.model.codec import decode
from perdure.model.errors import ProtocolError
from perdure.model.events import InvitationMade, InvitationRevoked, InvitationUsed, JournalEntry

_TYPES = (b'"InvitationMade"', b'"InvitationUsed"', b'"InvitationRevoked"')


def read_invitations(folder: str) -> list[dict[str, Any]]:
    """Return what `perdure invite` would ask for, of each invitation of the run in `folder`."""
    state = JobState()
    with contextlib.suppress(OSError), open(os.path.join(folder, "journal.jsonl"), "rb") as file:
        for line in file:
            if any(name in line for name in _TYPES):
                _note(state, line)
    return [
        {
            "id": id_,
            "digest": each.digest,
            "until_s": each.until_s,
            "uses": each.uses,
            "machines": dict(each.machines),
        }
        for id_, each in state.invitations.items()
        if not each.revoked
    ]


def _note(state: JobState, line: bytes) -> None:
    try:
        entry: JournalEntry = decode(line, JournalEntry)
    except ProtocolError:
        return  # Cut short by a loss of power.
    if isinstance(entry.body, InvitationMade | InvitationUsed | InvitationRevoked):
        note_invitation(state, entry.at_s, entry.body)
