"""Whose process is it: a table in, pids out."""

import contextlib
import os
import subprocess

from tests.waiting import PATIENCE_S, wait_until

from perdure.adapters.host import (
    Process,
    find_marked,
    parse_process,
    read_process,
    scan_processes,
)
from perdure.keeper.reaping import list_processes_below, list_strays

KEEPER = 10


def make_table(*rows: tuple[int, int, int, str, int]) -> dict[int, Process]:
    return {row[0]: Process(*row) for row in rows}


TABLE = make_table(
    (1, 0, 1, "S", 1),
    (KEEPER, 1, KEEPER, "S", 10),
    (11, KEEPER, KEEPER, "S", 11),  # image
    (12, 11, KEEPER, "S", 900),  # forked by it, not yet a rank
    (20, KEEPER, 20, "R", 100),  # rank of generation 1
    (21, 20, 20, "S", 101),  # its loader
    (22, 21, 22, "T", 102),  # with a session of its own
    (23, KEEPER, 20, "S", 103),  # orphan, still in the rank's session
    (24, KEEPER, 24, "S", 104),  # orphan that says nothing
    (25, KEEPER, 20, "Z", 105),
    (30, KEEPER, 30, "R", 200),  # rank of generation 2
    (31, KEEPER, 31, "S", 201),  # orphan of it that says nothing
    (40, 1, 20, "S", 106),  # not below the keeper
)
ROOTS = {20: 1, 30: 2}


def test_older_generation_with_all_descendants() -> None:
    assert list_processes_below(TABLE, KEEPER, ROOTS, {11}, 1, newer_start=200) == [
        20,
        21,
        22,
        23,
        24,
    ]


def test_everything_but_the_image() -> None:
    members = list_processes_below(TABLE, KEEPER, ROOTS, {11}, 2)
    assert members == [20, 21, 22, 23, 24, 30, 31]


def test_nothing_older() -> None:
    assert list_processes_below(TABLE, KEEPER, ROOTS, {11}, 0, newer_start=50) == []


def test_a_program_name_may_hold_brackets() -> None:
    fields = ["T", "5", "6", "7", *["0"] * 15, "4242", "0"]
    text = f"77 (a) S 1 (b) {' '.join(fields)}\n".encode()
    assert parse_process(77, text) == Process(77, 5, 7, "T", 4242)


def test_the_table_has_who_lives_and_nobody_else() -> None:
    gone = subprocess.Popen(["true"])
    gone.wait(PATIENCE_S)
    assert scan_processes()[os.getpid()] == read_process(os.getpid())
    assert read_process(gone.pid) is None


def test_strays_of_an_earlier_keeper() -> None:
    home = f"PERDURE_HOME=reap-{os.getpid()}"
    environs = (
        "PERDURE_KEEPER=1:1 PERDURE_JOB=a PERDURE_NODE=0",
        "PERDURE_KEEPER=2:2 PERDURE_JOB=a PERDURE_NODE=0",
        "PERDURE_KEEPER=1:1 PERDURE_JOB=b PERDURE_NODE=0",
        "PERDURE_JOB=a PERDURE_NODE=0",
    )
    marks = dict(item.split("=") for item in (home, "PERDURE_JOB=a", "PERDURE_NODE=0"))
    with contextlib.ExitStack() as stack:
        processes = []
        for text in environs:
            words = ["env", "-i", home, *text.split(), "sleep", "3600"]
            processes.append(stack.enter_context(subprocess.Popen(words)))
            stack.callback(processes[-1].kill)
        home = {"PERDURE_HOME": marks["PERDURE_HOME"]}
        wait_until(lambda: len(find_marked(home)) == len(environs))
        assert list_strays(marks, "2:2") == [processes[0].pid]
