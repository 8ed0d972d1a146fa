"""Rewrite recorded journals of an earlier format as today's: `python -m tests.golden.convert`.

The journals were recorded before a controller wrote down what it decided about failures, and
before lines had hashes. Each gets what a controller of today writes down by the same events.
"""

import gzip
import sys
from pathlib import Path

from msgspec import structs

from perdure.control.memory import Memory
from perdure.model.chain import FIRST, seal
from perdure.model.codec import decode_stored, encode
from perdure.model.events import Decision, JobSubmitted, JournalEntry


def convert(lines: list[bytes]) -> bytes:
    """Return the journal of today that has the events of `lines`."""
    told = write_down([decode_stored(line, JournalEntry) for line in lines])
    after, found = FIRST, []
    for seq, entry in enumerate(told, 1):
        line, after = seal(encode(structs.replace(entry, seq=seq)), after)
        found.append(line)
    return b"".join(found)


def write_down(entries: list[JournalEntry]) -> list[JournalEntry]:
    """Return the entries with what a controller of today decides about failures."""
    submitted = entries[0].body
    assert isinstance(submitted, JobSubmitted)
    machine = Memory(submitted.spec).machine
    told: list[JournalEntry] = []
    for entry in entries:
        told.append(entry)
        if isinstance(entry.body, Decision):
            continue
        machine.handle(entry.at_s, entry.body)
        for fact in machine.facts(entry.at_s):
            told.append(JournalEntry(seq=0, at_s=entry.at_s, body=fact))
            machine.handle(entry.at_s, fact)
    return told


if __name__ == "__main__":
    for name in sys.argv[1:]:
        path = Path(name)
        lines = gzip.decompress(path.read_bytes()).splitlines(keepends=True)
        path.write_bytes(gzip.compress(convert(lines), mtime=0))
