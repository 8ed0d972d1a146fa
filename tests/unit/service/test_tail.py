import re
import shutil
from pathlib import Path

from perdure.service.tail import RankTails


def write(folder: Path, generation: int, rank: int, text: str, name: str = "out") -> None:
    path = folder / f"g{generation}" / f"rank-{rank}.{name}"
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a") as file:
        file.write(text)


def test_lines_come_whole_and_once(tmp_path: Path) -> None:
    tails = RankTails(str(tmp_path / "ranks"))
    assert list(tails.poll()) == []
    write(tmp_path / "ranks", 0, 0, "one\ntw")
    write(tmp_path / "ranks", 0, 1, "err\n", "err")
    assert list(tails.poll()) == ["[rank 0] one", "[rank 1] err"]
    write(tmp_path / "ranks", 0, 0, "o\nend")
    assert list(tails.poll()) == ["[rank 0] two"]
    assert list(tails.poll(last=True)) == ["[rank 0] end"]
    assert list(tails.poll(last=True)) == []


def test_a_line_that_a_killed_rank_has_left_unfinished_comes_once_it_begins_again(
    tmp_path: Path,
) -> None:
    tails = RankTails(str(tmp_path))
    write(tmp_path, 0, 0, "\r 10%\r 20%", "err")
    write(tmp_path, 1, 1, "\r 30%", "err")
    assert list(tails.poll()) == [], "they may go on"
    write(tmp_path, 2, 0, "\r 15%\r 16%", "err")
    assert list(tails.poll()) == ["[rank 0]  20%"], "rank 1 is another group's, and lives"
    write(tmp_path, 2, 0, "\r100%\n", "err")
    assert list(tails.poll()) == ["[rank 0] 100%"]


def test_generations_that_came_and_went_between_two_polls_are_shown(tmp_path: Path) -> None:
    tails = RankTails(str(tmp_path))
    for generation in range(12):
        write(tmp_path, generation, 0, f"{generation}\n")
    assert list(tails.poll()) == [f"[rank 0] {generation}" for generation in range(12)]
    write(tmp_path, 3, 0, "late\n")
    write(tmp_path, 10, 0, "last words\n")
    assert list(tails.poll()) == ["[rank 0] last words"]


def test_what_was_there_before_is_not_shown(tmp_path: Path) -> None:
    write(tmp_path, 0, 0, "of an earlier run\n")
    tails = RankTails(str(tmp_path))
    write(tmp_path, 0, 0, "new\n")
    assert list(tails.poll()) == ["[rank 0] new"]


def test_bytes_that_are_no_text_and_long_lines_pass(tmp_path: Path) -> None:
    tails = RankTails(str(tmp_path))
    (tmp_path / "g0").mkdir()
    (tmp_path / "g0" / "rank-0.out").write_bytes(b"\xff\n" + b"x" * 60_000 + b"\n")
    assert list(tails.poll()) == ["[rank 0] \ufffd", "[rank 0] " + "x" * 60_000]


def test_a_line_of_any_length_is_held_in_bounded_memory(tmp_path: Path) -> None:
    """T3: a rank that writes 100 MB without a newline costs neither its supervisor nor a screen."""
    tails = RankTails(str(tmp_path))
    shown: list[str] = []
    for _ in range(12):
        write(tmp_path, 0, 0, "x" * 500_000)
        shown += tails.poll()
    assert len(shown) == 1
    assert shown[0].startswith("[rank 0] xxx")
    assert "rank-0.out" in shown[0]
    assert len(shown[0]) < 100_000
    write(tmp_path, 0, 0, "\nnext\n")
    assert list(tails.poll()) == ["[rank 0] next"]


def test_who_writes_faster_than_anybody_reads_is_shown_near_its_end(tmp_path: Path) -> None:
    """T10: one look is bounded, others get their turn, and what is left out is said."""
    tails = RankTails(str(tmp_path))
    write(tmp_path, 0, 0, "".join(f"{number:099}\n" for number in range(200_000)))
    write(tmp_path, 0, 1, "of another\n")
    lines = list(tails.poll())
    assert sum(map(len, lines)) < 1_000_000
    assert re.fullmatch(r"\[rank 0\] … 19,[\d,]+ bytes are not shown: see .*rank-0.out", lines[0])
    assert lines[-2:] == [f"[rank 0] {199_999:099}", "[rank 1] of another"]


def test_nothing_is_left_out_for_who_writes_a_little_at_a_time(tmp_path: Path) -> None:
    tails = RankTails(str(tmp_path))
    write(tmp_path, 0, 0, "".join(f"{number:099}\n" for number in range(20_000)))
    for generation in (1, 2, 3):
        write(tmp_path, generation, 0, "newer\n")
    lines: list[str] = []
    while fresh := list(tails.poll()):
        lines += fresh
    assert [line for line in lines if "newer" not in line] == [
        f"[rank 0] {number:099}" for number in range(20_000)
    ]


def test_folders_that_go_or_are_none_stop_nothing(tmp_path: Path) -> None:
    tails = RankTails(str(tmp_path))
    (tmp_path / "g0").write_text("a file")
    (tmp_path / "g1" / "rank-0.out").mkdir(parents=True)
    write(tmp_path, 2, 0, "x\n")
    assert list(tails.poll()) == ["[rank 0] x"]
    (tmp_path / "g2" / "rank-0.out").write_text("y\n")  # As `copytruncate` leaves it.
    write(tmp_path, 2, 0, "z\n")
    shutil.rmtree(tmp_path / "g1")
    assert list(tails.poll())[-1:] == ["[rank 0] z"]
    shutil.rmtree(tmp_path)
    assert list(tails.poll()) == []
