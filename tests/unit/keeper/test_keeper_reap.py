"""Whose process is it: a table in, pids out."""

from pathlib import Path

from perdure.keeper.reaping import (
    Process,
    list_processes_below,
    list_strays,
    read_process,
    scan_processes,
)

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


def test_a_program_name_may_hold_brackets(tmp_path: Path) -> None:
    folder = tmp_path / "77"
    folder.mkdir()
    fields = ["T", "5", "6", "7", *["0"] * 15, "4242", "0"]
    (folder / "stat").write_text(f"77 (a) S 1 (b) {' '.join(fields)}\n")
    assert read_process(77, str(tmp_path)) == Process(77, 5, 7, "T", 4242)
    assert list(scan_processes(str(tmp_path))) == [77]
    assert read_process(78, str(tmp_path)) is None


def test_strays_of_an_earlier_keeper(tmp_path: Path) -> None:
    environs = {
        50: "PERDURE_KEEPER=1:1 PERDURE_JOB=a PERDURE_NODE=0",
        51: "PERDURE_KEEPER=2:2 PERDURE_JOB=a PERDURE_NODE=0",
        52: "PERDURE_KEEPER=1:1 PERDURE_JOB=b PERDURE_NODE=0",
        53: "PERDURE_JOB=a PERDURE_NODE=0",
    }
    for pid, text in environs.items():
        (tmp_path / str(pid)).mkdir()
        (tmp_path / str(pid) / "environ").write_text(text.replace(" ", "\0") + "\0")
    table = make_table(*((pid, 1, pid, "S", 1) for pid in environs))
    marks = {"PERDURE_KEEPER": "2:2", "PERDURE_JOB": "a", "PERDURE_NODE": "0"}
    assert list_strays(table, marks, str(tmp_path)) == [50]
