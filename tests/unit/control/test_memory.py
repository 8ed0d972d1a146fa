"""T3: what a controller knows of its journal is bounded, whoever speaks."""

from perdure.control import memory
from perdure.control.memory import Memory, decode_memory, encode_memory
from perdure.model.events import GenerationStopped, JournalEntry
from perdure.model.job import JobSpec

SPEC = JobSpec(name="job", script="train.py", nproc=2)


def tell(known: Memory, source: str, number: int) -> None:
    event = GenerationStopped(node=0, generation=0, at_s=1.0)
    known.note(JournalEntry(known.seq + 1, 1.0, event, source, number))


def test_sources_without_end_are_forgotten_and_who_speaks_is_known(monkeypatch) -> None:
    monkeypatch.setattr(memory, "SOURCES_MAX", 40)
    known = Memory(SPEC)
    for number in range(1, 200):
        tell(known, f"a0-{number}", 1)
        tell(known, "g0-r1-p7", number)
        if number == 150:
            again = decode_memory(encode_memory(known), SPEC)
        elif number > 150:
            tell(again, f"a0-{number}", 1)
            tell(again, "g0-r1-p7", number)
    assert len(known.taken) == 40
    assert known.taken["g0-r1-p7"] == 199
    assert again.taken == known.taken, "from a snapshot as from the first entry on"
