"""What a controller of today writes down about failures, beside what is found in an old journal.

Every recorded job is told twice to the ledger: as it was recorded, by a controller that did not
write its failures down, so that they are found again from the rest (`telemetry/older`); and with
what a controller of today decides when it meets the same events. The reports are the same, but for
what the older reading had wrong.
"""

from typing import Any

import pytest
from msgspec import structs

from perdure.control.memory import Memory
from perdure.model.codec import decode, encode
from perdure.model.events import ControllerStarted, Decision, FailureDecided, JournalEntry
from tests import older
from tests.golden.decisions import FAMILIES, find_recorded, read_recorded, report_again
from tests.simulator import Scenario, Simulation
from tests.simulator.elastic import ElasticSimulation

MENDED = {
    "elastic-early-exit": "a broken world's wait for word of a loss is deciding, and not aborting",
    "elastic-stopped": "a hung rank's end is decided when it is ordered, and not once it is dead",
}
_BROKE = "retry: the world broke of the world"
_KILLED = "signal 9 (SIGKILL)"
_LEFT, _HUNG = "EarlyExit (busy)", "ComputeHang (stopped)"
DIFFER = {
    # Who came in broke the world by it. The older reading does not see why it was formed again.
    ("elastic", 0): (["join: join of rank 4"], [_BROKE]),
    ("elastic", 1): (["join: join of rank 11"], [_BROKE]),
    ("elastic", 12): (["join: join of rank 4"], [_BROKE]),
    ("elastic", 18): (["join: join of rank 5"], [_BROKE]),
    ("elastic in a storm", 501): (["join: join of rank 15", "join: join of rank 9"], [_BROKE] * 2),
    ("elastic in a storm", 502): ([f"join: join of rank {r}" for r in (11, 9, 8)], [_BROKE] * 3),
    ("elastic in a storm", 510): (["join: join of rank 14, 15, 21"], [_BROKE]),
    ("elastic in a storm", 512): (["join: join of rank 11, 13"], [_BROKE]),
    ("elastic with spares", 700): (["join: join of rank 4"], [_BROKE]),
    ("elastic with spares", 703): (["join: join of rank 8"], [_BROKE]),
    # The same, where the start of who came in after its keeper's end is not told.
    ("elastic", 49): ([], [_BROKE]),
    ("elastic", 53): ([], [_BROKE]),
    # A keeper died of whose generation nobody had told anything yet, and its world never began.
    ("elastic in a storm", 507): (
        [f"restart: {_KILLED} of rank 0", "restart: keeper lost of node 0"],
        [f"restart: {_KILLED} of rank 0"],
    ),
    ("spares", 5015): (
        [f"restart: {_HUNG} of rank 2", "restart: keeper lost of node 1"],
        [f"restart: {_HUNG} of rank 2"],
    ),
    # A spare had died beside the world just before: that is not why the world was formed again.
    ("elastic with spares", 704): (
        ["shrink: keeper lost of node 0"],
        [f"shrink: {_KILLED} of rank 9"],
    ),
    # A keeper died before all had said that they are in the epoch that broke by it.
    ("elastic with spares", 705): (
        [
            f"replace: {_KILLED} of rank 3",
            f"shrink: {_KILLED} of rank 4",
            "join: join of rank 9",
        ],
        [_BROKE, _BROKE, "replace: keeper lost of node 1"],
    ),
    # A newcomer died before it was in, and before its agent had told of its start.
    ("elastic", 30): (["join: join of rank 15"], [f"replace: {_KILLED} of rank 7"]),
    # A newcomer died in the epoch that it had come in with, before its agent had told so.
    ("elastic with spares", 728): ([f"shrink: {_KILLED} of rank 4"], []),
    # The older reading takes an order that a new controller repeats for what was decided next.
    ("agreements in a storm", 1015): ([f"restart: {_HUNG} of rank 2"],) * 2,
    ("storm", 1054): ([f"restart: {_LEFT} of rank 10"],) * 2,
    # The older reading takes the step from the epoch that follows, and the world started again.
    ("elastic with spares", 701): (["restart: keeper lost of node 2"],) * 2,
}
"""Simulated jobs whose reports are not the same -> the incidents that only one of them has.

First those as they were written down, then those as the older reading finds them. Of all seeds each
was looked at: what was written down is what has happened.
"""


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
    """Return the entries without what was written down about failures, as a disk gives them."""
    kept = [
        decode(encode(e), JournalEntry) for e in entries if not isinstance(e.body, FailureDecided)
    ]
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


@pytest.mark.parametrize(
    ("family", "seed"),
    [(family, seed) for family, (_, seeds, _) in FAMILIES.items() for seed in seeds[:2]]
    + [
        pytest.param(family, seed, marks=pytest.mark.long)
        for family, (_, seeds, _) in FAMILIES.items()
        for seed in seeds[2:]
        if (family, seed) not in DIFFER
    ],
)
def test_simulated_jobs_read_the_same_with_their_failures_written_down(
    family: str, seed: int
) -> None:
    if (family, seed) not in DIFFER:
        journal = play(family, seed)
        assert report_again(journal) == report_again(forget(journal))


@pytest.mark.parametrize(("family", "seed"), DIFFER)
def test_what_is_read_otherwise_is_what_the_older_reading_has_wrong(family: str, seed: int) -> None:
    journal = play(family, seed)
    told, again = report_again(journal), report_again(forget(journal))
    rows, older_rows = told["recoveries"], again["recoveries"]
    only = [name(row) for row in rows if row not in older_rows]
    older_only = [name(row) for row in older_rows if row not in rows]
    assert (only, older_only) == DIFFER[family, seed]


def name(row: dict[str, Any]) -> str:
    return f"{row['rung']}: {row['cause']} of {row['culprit']}"


def test_late_news_of_an_epoch_end_no_failure_of_the_generation() -> None:
    """What a member says of epoch 0 comes once the world has failed: seed 14 had no incident."""
    rows = report_again(play("elastic", 14))["recoveries"]
    assert [(row["culprit"], row["rung"]) for row in rows] == [("rank 1", "restart")]


def test_a_world_formed_in_place_says_how_far_it_was() -> None:
    """Accounts of before may be old: on seed 51 they said 50 steps, where 55 were committed."""
    rows = report_again(play("elastic", 51))["recoveries"]
    assert [row["at_step"] for row in rows if row["culprit"] == "rank 2"] == [55]
