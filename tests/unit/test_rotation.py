"""Files that are appended to by others, cut at their front: nothing is lost, and in order."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from perdure.cli.looking.output import Stream
from perdure.files import rotation
from perdure.files.private import locate_job
from perdure.files.rotation import (
    list_parts,
    list_parts_of,
    measure_file,
    read_piece,
    read_pieces,
    rotate_file,
)
from perdure.model.job import JobSpec
from perdure.service.agent.logs import LogWatch
from perdure.service.tail import RankTails

HEAD, PART = 1 << 17, 1 << 19
WRITER = """
import os, sys
fd = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
for number in range(int(sys.argv[2])):
    os.write(fd, b"line %09d\\n" % number)
"""


@pytest.fixture(params=["collapse", "empty"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How a file is cut: as ext4 and XFS can, and as every file system can."""
    if request.param == "empty":
        monkeypatch.setattr(rotation, "_collapse", lambda fd, length: False)
    return str(request.param)


def write(path: Path, lines: range) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(fd, b"".join(b"line %09d\n" % number for number in lines))
    os.close(fd)


def read_numbers(lines: Iterator[str]) -> list[int]:
    return [int(line.split()[-1]) for line in lines if "line" in line]


def test_its_beginning_and_its_newest_part_are_kept(tmp_path: Path, way: str) -> None:
    path = tmp_path / "rank-0.out"
    for first in range(0, 400_000, 10_000):
        write(path, range(first, first + 10_000))
        rotate_file(str(path), HEAD, PART)
    parts = list_parts(str(path))
    assert (len(parts), parts[0].begin, parts[-1].end) == (3, 0, 400_000 * 15)
    assert sum(part.end - part.begin for part in parts) < HEAD + 2 * PART + 3 * 150_000
    assert parts[1].end == parts[2].begin
    told = list(Stream(0, 0, "out", str(path)).read(last=True))
    numbers = [int(line[5:]) for line in told if line.startswith("line") and len(line) == 14]
    assert numbers[:100] == list(range(100))
    assert numbers[-20_000:] == list(range(380_000, 400_000))
    assert sum("bytes are not kept" in line for line in told) == 1


def test_who_follows_misses_nothing_while_a_process_writes(tmp_path: Path) -> None:
    """The real thing: a process that writes as fast as it can, and a file cut under its feet."""
    folder = tmp_path / "g0"
    folder.mkdir()
    path, tails = folder / "rank-0.out", RankTails(str(tmp_path))
    stream = Stream(0, 0, "out", str(path))
    command = [sys.executable, "-c", WRITER, str(path), "60000"]
    followed: list[str] = []
    shown: list[str] = []
    cuts = 0
    with subprocess.Popen(command) as writer:
        while writer.poll() is None:
            if path.exists():
                cuts += rotate_file(str(path), HEAD, PART // 2)
            followed += stream.read(last=False)
            shown += tails.poll()
    followed += stream.read(last=True)
    shown += tails.poll(last=True)
    assert cuts > 1
    collapses = rotation._collapse is not None and not any("kept" in line for line in followed)
    assert collapses
    assert read_numbers(iter(followed)) == list(range(60_000))
    if not any("not shown" in line for line in shown):
        assert read_numbers(iter(shown)) == list(range(60_000))


@pytest.mark.parametrize("cut", [False, True])
def test_a_death_in_the_middle_of_a_cut_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cut: bool
) -> None:
    path = tmp_path / "rank-0.out"
    write(path, range(20_000))

    def die(*_: object) -> bool:
        raise KeyboardInterrupt

    monkeypatch.setattr(rotation.os, "rename" if cut else "unlink", die)
    if not cut:
        monkeypatch.setattr(rotation, "_collapse", die)
    with pytest.raises(KeyboardInterrupt):
        rotate_file(str(path), HEAD, PART)
    monkeypatch.undo()
    assert (tmp_path / "rank-0.out.@new").exists()
    write(path, range(20_000, 21_000))
    rotate_file(str(path), HEAD, PART)
    assert read_numbers(Stream(0, 0, "out", str(path)).read(last=True)) == list(range(21_000))


def test_a_full_disk_leaves_it_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "rank-0.out"
    write(path, range(20_000))

    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(rotation.shutil, "copystat", refuse)
    with pytest.raises(OSError, match="No space"):
        rotate_file(str(path), HEAD, PART)
    assert [entry.name for entry in tmp_path.iterdir()] == ["rank-0.out"]
    assert measure_file(str(path)) == 300_000


def test_all_generations_together_are_bounded(tmp_path: Path) -> None:
    spec = JobSpec(name="job", script="x.py", nproc=2)
    paths = locate_job(str(tmp_path), "job")
    for generation in range(6):
        for rank in range(2):
            path = Path(paths.stream(generation, rank, "out"))
            path.parent.mkdir(parents=True, exist_ok=True)
            write(path, range(20_000))
            rotate_file(str(path), HEAD, PART)
    watch = LogWatch(spec, paths, 0)

    def sizes() -> list[int]:
        return [
            sum(p.end - p.begin for rank in range(2)
                for p in list_parts(paths.stream(generation, rank, "out")))
            for generation in range(6)
        ]  # fmt: skip

    whole = 2 * 300_000
    watch.thin(range(2), int(5.7 * whole))
    assert sizes()[0] == whole
    assert 0 < sizes()[1] < whole
    assert sizes()[4:] == [whole, whole]
    watch.thin(range(2), 3 * whole)
    assert sizes() == [whole, 0, 0, 0, whole, whole]


def test_a_piece_of_nothing_is_nothing(tmp_path: Path) -> None:
    assert read_piece(str(tmp_path / "none"), 0, 100) == (0, b"")
    assert not rotate_file(str(tmp_path / "none"))


def test_many_files_are_read_with_each_folder_listed_twice(tmp_path: Path) -> None:
    paths = [str(tmp_path / f"rank-{number}.out") for number in range(40)]
    for number, path in enumerate(paths):
        Path(path).write_bytes(b"%d\n" % number * 50_000)
    assert rotate_file(paths[3], head_bytes=1000, part_bytes=4096)
    assert rotate_file(paths[7], head_bytes=1000, part_bytes=4096)
    parts = list_parts_of(paths)
    assert parts == {path: list_parts(path) for path in paths}
    offsets = {path: max(0, parts[path][-1].end - 5000) for path in paths}
    listed: list[str] = []
    counting = True
    sys.addaudithook(lambda event, args: event == "os.scandir" and counting and listed.append("1"))
    found = read_pieces(offsets, 5000)
    counting = False
    assert len(listed) == 2
    assert found == {path: read_piece(path, offsets[path], 5000) for path in paths}
    assert all(data for _, data in found.values())
    assert read_pieces({str(tmp_path / "none"): 7}, 10) == {str(tmp_path / "none"): (7, b"")}
