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
    (tmp_path / "g0" / "rank-0.out").write_bytes(b"\xff\n" + b"x" * 3_000_000 + b"\n")
    assert list(tails.poll()) == ["[rank 0] \ufffd", "[rank 0] " + "x" * 3_000_000]
