"""Who was held when a `perdure serve` was killed: the next one of the same name holds them as well.

An operator's word outlives the processes that had heard it, and is in the journal. Groups are known
again by their names; one without a name of its own cannot be told from others, and that is said.
"""

from dataclasses import dataclass, field

from perdure.model.chain import EntryReader
from perdure.model.errors import ProtocolError
from perdure.model.events import Decision, JobEnded, JobSubmitted, JournalEntry, NodeCordoned
from perdure.model.job import HeldGroup, JobSpec
from perdure.model.paths import JobPaths
from perdure.service.jobfiles import MINE, read_last_entries, read_lines
from perdure.telemetry.live.replicas import ReplicaFold


@dataclass(slots=True)
class Holds:
    """What the serve before has left."""

    groups: tuple[HeldGroup, ...] = ()
    lost: list[str] = field(default_factory=list)
    """Replica ids of groups that were held and cannot be known again."""
    damage: str = ""
    """What of its journal cannot be read, so that not all may be known."""


def read_holds(paths: JobPaths) -> Holds:
    """Return whom an operator held when the serve died that has left its journal in `paths`.

    Nobody where there is none, or where it came to its own end: that ended its holds as well, and
    its last lines say so. Only of one that was killed is all of it read.
    """
    if any(isinstance(entry.body, JobEnded) for entry in _read_end(paths)):
        return Holds()
    fold, words = ReplicaFold(), dict[int, NodeCordoned]()
    reader = EntryReader(read_lines(paths.journal), mine=MINE, without=("Decision",))
    for entry in reader:
        match entry.body:
            case Decision():
                continue
            case JobEnded() | JobSubmitted(spec=JobSpec(served=False)):
                return Holds()
            case NodeCordoned() as word:
                words[word.node] = word
        fold.add(entry.body)
    holds = Holds(damage="" if reader.tally.whole else reader.tally.describe())
    names = [view.replica.rpartition(":")[0] for view in fold.groups.values()]
    for number in sorted(fold.cordoned & fold.groups.keys()):
        view, word = fold.groups[number], words[number]
        name = view.replica.rpartition(":")[0]
        if not name or names.count(name) > 1:
            holds.lost.append(f"group {number} ({view.replica})")
            continue
        trains = view.replica in fold.members and not view.away
        held = HeldGroup(
            name=name,
            number=number,
            who=word.who,
            reason=word.reason,
            trains=view.replica if trains else "",
        )
        holds.groups = (*holds.groups, held)
    return holds


def _read_end(paths: JobPaths) -> list[JournalEntry]:
    try:
        return read_last_entries(paths)
    except ProtocolError:
        return []  # All of it is looked at, and what is wrong with it told.
