"""What a controller of today writes down about failures, beside what is found in an old journal.

Every recorded job is told twice to the ledger: as it was recorded, by a controller that did not
write its failures down, so that they are found again from the rest (`telemetry/older`); and with
what a controller of today decides when it meets the same events. The reports are the same, but for
what the older reading had wrong.
"""

from typing import Any

import pytest
from msgspec import structs

from perdure.control import Memory
from perdure.model.events import ControllerStarted, Decision, FailureDecided, JournalEntry
from perdure.sim import Scenario, Simulation
from perdure.sim.elastic_job import ElasticSimulation
from tests import older
from tests.golden.decisions import FAMILIES, find_recorded, read_recorded, report_again

MENDED = {
    "elastic-early-exit": "a broken world's wait for word of a loss is deciding, and not aborting",
    "elastic-stopped": "a hung rank's end is decided when it is ordered, and not once it is dead",
}
SAME = ("faults", "spares", "deaths between", "kills")
"""Families of simulated jobs whose reports are the same on every seed."""


def write_down(entries: list[JournalEntry]) -> list[JournalEntry]:
    """Return the entries with what a controller of today decides about failures."""
    machine = Memory(older.find_spec(entries)).machine
    told: list[JournalEntry] = []
    for entry in entries:
        body = entry.body
        if isinstance(body, ControllerStarted):
            body = structs.replace(body, failures=True)
        told.append(structs.replace(entry, body=body))
        if isinstance(body, Decision):
            continue
        machine.handle(entry.at_s, body)
        for fact in machine.facts(entry.at_s):
            told.append(JournalEntry(seq=0, at_s=entry.at_s, body=fact))
            machine.handle(entry.at_s, fact)
    return told


def forget(entries: list[JournalEntry]) -> list[JournalEntry]:
    """Return the entries without what was written down about failures."""
    kept = [e for e in entries if not isinstance(e.body, FailureDecided)]
    return [
        structs.replace(e, body=structs.replace(e.body, failures=False))
        if isinstance(e.body, ControllerStarted)
        else e
        for e in kept
    ]


def without_moments(report: dict[str, Any]) -> dict[str, Any]:
    """Return a report without what lies between a failure and the end of the last process."""
    moments = ("detect", "decide", "abort")
    ledger = {k: v for k, v in report["ledger"].items() if k.rpartition(".")[2] not in moments}
    rows = [
        {k: v for k, v in row.items() if k.removesuffix("_s") not in moments}
        for row in report["recoveries"]
    ]
    return report | {"ledger": ledger, "recoveries": rows}


@pytest.mark.parametrize("name", find_recorded())
def test_a_recorded_job_reads_the_same_with_its_failures_written_down(name: str) -> None:
    entries = read_recorded(name)
    before, after = report_again(entries), report_again(write_down(entries))
    if name in MENDED:
        assert before != after, MENDED[name]
        before, after = without_moments(before), without_moments(after)
    assert before == after


@pytest.mark.parametrize("name", find_recorded())
def test_a_journal_that_another_perdure_goes_on_with_reads_the_same(name: str) -> None:
    """Up to the middle its failures are found again, and from there on they are written down."""
    entries = read_recorded(name)
    middle = len(entries) // 2
    taken_over = ControllerStarted(incarnation="new", failures=True)
    entry = JournalEntry(seq=0, at_s=entries[middle].at_s, body=taken_over)
    half = [*entries[: middle + 1], entry, *entries[middle + 1 :]]
    machine = Memory(older.find_spec(entries)).machine
    told: list[JournalEntry] = []
    for each in half:
        told.append(each)
        if isinstance(each.body, Decision):
            continue
        machine.handle(each.at_s, each.body)
        for fact in machine.facts(each.at_s) if machine.state.book.told else ():
            told.append(JournalEntry(seq=0, at_s=each.at_s, body=fact))
            machine.handle(each.at_s, fact)
    before, after = report_again(entries), report_again(told)
    names = ("cause", "culprit", "at_step", "lost_steps")
    assert [[row[name] for name in names] for row in before["recoveries"]] == [
        [row[name] for name in names] for row in after["recoveries"]
    ]


def play(family: str, seed: int) -> list[JournalEntry]:
    kind, _, changes = FAMILIES[family]
    assert kind in (Simulation, ElasticSimulation)
    simulation = kind(Scenario(seed=seed, **changes))  # type: ignore[arg-type]
    simulation.run()
    return simulation.journal


@pytest.mark.parametrize("family", SAME)
def test_simulated_jobs_read_the_same_with_their_failures_written_down(family: str) -> None:
    for seed in FAMILIES[family][1][:2]:
        journal = play(family, seed)
        assert report_again(journal) == report_again(forget(journal)), seed


def test_an_exit_that_is_told_again_is_no_second_incident() -> None:
    """The newest agent of a node repeats what it cannot know to be known: rank 3's, on seed 1."""
    journal = play("elastic", 1)
    culprits = [row["culprit"] for row in report_again(journal)["recoveries"]]
    again = [row["culprit"] for row in report_again(forget(journal))["recoveries"]]
    assert (culprits.count("rank 3"), again.count("rank 3")) == (1, 2)
