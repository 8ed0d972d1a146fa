"""A queue's decisions: records in, attempts to start out."""

from typing import Any

from perdure.control.queue import (
    Book,
    compute_ready_s,
    decide,
    explain,
    list_oversized,
    next_deadline,
)
from perdure.model.queue import Again, Ended, Ending, Found, Item, Put, Record, Removed, Started

ONE = ("cpu-0",)


def put(name: str, **fields: Any) -> Put:
    return Put(0.0, Item(name=name, command=("true",), **fields))


def run(name: str, attempt: int = 1, at_s: float = 1.0, **ending: Any) -> list[Record]:
    return [
        Started(at_s, name, attempt, ONE),
        Ended(name, attempt, Ending(at_s=at_s + 1.0, **ending)),
    ]


def names(book: Book, now_s: float = 10.0, slots: tuple[str, ...] = ONE) -> list[str]:
    return [start.name for start in decide(book, now_s, slots)]


def test_priority_then_the_order_of_adding() -> None:
    book = Book.read([put("a"), put("b", priority=1), put("c", priority=1)])
    assert names(book, slots=("cpu-0", "cpu-1", "cpu-2")) == ["b", "c", "a"]


def test_what_is_described_anew_keeps_its_place() -> None:
    book = Book.read([put("a"), put("b"), put("a", retries=9)])
    assert names(book) == ["a"]
    assert book.lines["a"].item.retries == 9


def test_an_item_waits_for_those_it_needs_and_is_blocked_by_their_failure() -> None:
    records = [put("a", retries=0), put("b", after=("a",)), put("c", after=("b",))]
    book = Book.read(records)
    assert names(book) == ["a"]
    assert explain(book, book.lines["b"], 0.0) == "waits for a"
    assert names(Book.read([*records, *run("a")])) == ["b"]
    failed = Book.read([*records, *run("a", code=1)])
    assert names(failed) == []
    assert failed.unfinished() == []
    assert explain(failed, failed.lines["c"], 0.0) == "needs `a`, which failed"
    mended = Book.read([*records, *run("a", code=1), Again(9.0, "a")])
    assert names(mended) == ["a"]
    assert len(mended.unfinished()) == 3


def test_retries_wait_longer_each_time_and_end() -> None:
    records: list[Record] = [put("a", backoff_s=10.0, retries=2)]
    records += run("a", 1, 100.0, code=1)
    book = Book.read(records)
    assert compute_ready_s(book.lines["a"]) == 111.0
    assert next_deadline(book, 105.0) == 111.0
    assert names(book, 110.9) == []
    assert [(s.name, s.attempt) for s in decide(book, 111.0, ONE)] == [("a", 2)]
    book = Book.read([*records, *run("a", 2, 200.0, signal=9)])
    assert compute_ready_s(book.lines["a"]) == 221.0
    book = Book.read([*records, *run("a", 2, 200.0, signal=9), *run("a", 3, 300.0, code=1)])
    assert book.lines["a"].state == "failed"


def test_a_clock_that_was_set_back_holds_nothing_up() -> None:
    book = Book.read([put("a"), *run("a", 1, 1e9, code=1)])
    assert names(book, 5.0) == ["a"]


def test_an_exit_code_that_will_come_again_is_not_tried_again() -> None:
    book = Book.read([put("a", retries=5), *run("a", code=2)])
    assert book.lines["a"].state == "failed"
    assert "the same way" in book.lines["a"].reason


def test_exit_code_zero_without_the_files_is_a_failure() -> None:
    book = Book.read([put("a"), *run("a", missing=("best.pt",))])
    assert book.lines["a"].state == "waiting"
    assert "best.pt" in book.lines["a"].reason


def test_slots_are_given_once_and_a_wide_item_is_not_starved() -> None:
    slots = ("g0", "g1", "g2")
    records: list[Record] = [put("x"), put("wide", gpus=3), put("small")]
    assert [s.slots for s in decide(Book.read(records), 0.0, slots)] == [("g0",)]
    book = Book.read([*records, Started(1.0, "x", 1, ("g1",))])
    assert names(book, slots=slots) == []
    book.add(Ended("x", 1, Ending(at_s=2.0)))
    assert [s.slots for s in decide(book, 3.0, slots)] == [slots]
    assert decide(book, 3.0, slots, busy=("g0",)) == []


def test_an_item_wider_than_the_machine_is_passed_over_and_named() -> None:
    book = Book.read([put("wide", gpus=4), put("small")])
    assert names(book) == ["small"]
    assert [line.item.name for line in list_oversized(book, ONE)] == ["wide"]


def test_removal_of_what_runs_takes_effect_at_its_end() -> None:
    records = [put("a"), Started(1.0, "a", 1, ONE), Removed(2.0, "a")]
    book = Book.read(records)
    assert book.lines["a"].removed
    assert names(book) == []
    book.add(Ended("a", 1, Ending(at_s=3.0, code=1)))
    assert book.lines == {}


def test_an_ending_counts_once_and_only_for_the_newest_attempt() -> None:
    records = [put("a"), *run("a", 1, code=1), Started(20.0, "a", 2, ONE)]
    book = Book.read([*records, Ended("a", 1, Ending(at_s=21.0))])
    assert book.lines["a"].state == "running"
    book.add(Ended("a", 2, Ending(at_s=22.0)))
    book.add(Ended("a", 2, Ending(at_s=22.0, code=1)))
    assert book.lines["a"].state == "done"


def test_files_that_are_there_spare_a_run_unless_it_is_asked_for() -> None:
    book = Book.read([put("a"), Found(1.0, "a")])
    assert book.lines["a"].state == "done"
    book.add(Again(2.0, "a"))
    assert names(book) == ["a"]
    assert book.lines["a"].again
