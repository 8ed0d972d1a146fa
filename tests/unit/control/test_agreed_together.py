"""What many ranks say to an agreement at once is one entry: what follows from it is the same."""

from itertools import groupby

import pytest
from tests.simulator import Scenario, Simulation

from perdure.control.memory import Memory
from perdure.model.codec import decode, encode
from perdure.model.events import (
    BoundaryAnswered,
    BoundaryReached,
    JobSubmitted,
    JournalEntry,
    RanksAgreed,
    name_agreement,
)


def join_entries(journal: list[JournalEntry]) -> list[JournalEntry]:
    """The same journal, with neighbours that can be one entry as one."""
    joined: list[JournalEntry] = []
    for name, group in groupby(journal, key=lambda entry: name_agreement(entry.body)):
        entries = list(group)
        if not name or len(entries) < 2:
            joined += entries
            continue
        told = [
            (e.source, e.source_seq, e.body)
            for e in entries
            if isinstance(e.body, BoundaryAnswered | BoundaryReached)
        ]
        body = decode(encode(RanksAgreed.join(told)), RanksAgreed)
        joined.append(JournalEntry(entries[-1].seq, entries[-1].at_s, body))
    return joined


@pytest.mark.parametrize("seed", [3, 4])
def test_a_replay_knows_the_same(seed: int) -> None:
    simulation = Simulation(
        Scenario(seed=seed, nodes=2, nproc=4, faults=2, commands=("checkpoint",) * 4)
    )
    simulation.run()
    journal, first = simulation.journal, simulation.journal[0].body
    assert isinstance(first, JobSubmitted)
    spec = first.spec
    apart, together = Memory(spec), Memory(spec)
    joined = join_entries(journal)
    assert sum(isinstance(entry.body, RanksAgreed) for entry in joined) > 2
    for entry in journal:
        apart.replay(entry)
    for entry in joined:
        together.replay(entry)
    assert encode(together.machine.state.answered) == encode(apart.machine.state.answered)
    assert together.machine.state == apart.machine.state
    assert together.taken == apart.taken
