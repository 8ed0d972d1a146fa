"""The files of curves: folded, by whoever acts, and harmless whatever becomes of them."""

import errno
import os
from pathlib import Path

import pytest

from perdure.model.events import MetricsLogged
from perdure.service import curves as module
from perdure.service.curves import CurveFiles, read_curves


def log(files: CurveFiles, steps: range) -> None:
    for step in steps:
        event = MetricsLogged(generation=0, rows=((step, {"loss": 1.0 * step, "lr": 0.1}),))
        files.append(1000.0 + step, "g0-r0-p1", event)


def steps_of(folder: Path) -> list[int]:
    return [int(bucket.step) for bucket in read_curves(str(folder)).curves.get("loss", ())]


def test_a_job_that_logs_nothing_has_no_folder(tmp_path: Path) -> None:
    files = CurveFiles(str(tmp_path / "curves"), "c1")
    files.fold(files.begin_next())
    assert files.read_newest() == {}
    assert list(tmp_path.iterdir()) == []


def test_what_is_folded_is_read_with_what_is_new(tmp_path: Path) -> None:
    files = CurveFiles(str(tmp_path), "c1")
    log(files, range(100))
    files.fold(files.begin_next())
    log(files, range(100, 150))
    assert steps_of(tmp_path) == list(range(150))
    assert files.read_newest() == {"loss": 149.0, "lr": 0.1}
    successor = CurveFiles(str(tmp_path), "c2")
    log(successor, range(150, 160))
    log(files, range(160, 170))  # Of one that is deposed and does not know it.
    assert steps_of(tmp_path) == list(range(170))


def test_a_death_between_two_steps_of_folding_counts_nothing_twice(tmp_path: Path) -> None:
    """Nor does an older copy of a file beside a newer one of the rest, as a pull may leave it."""
    files = CurveFiles(str(tmp_path), "c1")
    old: dict[Path, bytes] = {}
    for first in (0, 100, 200):
        log(files, range(first, first + 100))
        paths = files.begin_next()
        old |= {path: path.read_bytes() for path in paths}
        files.fold(paths)
    for path, data in old.items():
        path.write_bytes(data)
    curves = read_curves(str(tmp_path))
    assert [bucket.values for bucket in curves.curves["loss"]] == [1.0] * 300
    files = CurveFiles(str(tmp_path), "c2")
    files.fold(files.begin_next())
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["kept", "lock"]
    assert steps_of(tmp_path) == list(range(300))


@pytest.mark.parametrize("flip", ["kept", "new"])
def test_what_is_damaged_is_set_aside_and_said(tmp_path: Path, flip: str) -> None:
    files = CurveFiles(str(tmp_path), "c1")
    log(files, range(100))
    files.fold(files.begin_next())
    log(files, range(100, 110))
    (path,) = tmp_path.glob(f"{flip}*")
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    curves = read_curves(str(tmp_path))
    assert curves.dropped["curves"].count == 1
    assert len(steps_of(tmp_path)) == (10 if flip == "kept" else 109)
    log(files, range(110, 120))
    files.fold(files.begin_next())
    assert (tmp_path / "damaged").exists() == (flip == "kept")
    assert read_curves(str(tmp_path)).dropped["curves"].count == 1
    assert steps_of(tmp_path)[-1] == 119


def test_a_full_disk_costs_values_and_says_how_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same on a disk that is really full: `tests/e2e/test_full_disk.py`."""
    files = CurveFiles(str(tmp_path), "c1")
    log(files, range(10))
    whole = os.pwrite

    def refuse(fd: int, data: bytes, offset: int) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    def cut(fd: int, data: bytes, offset: int) -> int:
        return whole(fd, data[:20], offset)

    for refusal in (refuse, cut):
        monkeypatch.setattr(module.os, "pwrite", refusal)
        log(files, range(10, 20))
    monkeypatch.setattr(module.os, "pwrite", whole)
    log(files, range(20, 30))
    curves = read_curves(str(tmp_path))
    assert steps_of(tmp_path) == [*range(10), *range(20, 30)]
    assert {source: one.count for source, one in curves.dropped.items()} == {"g0-r0-p1": 40}


def test_a_step_that_no_float_has_costs_its_line(tmp_path: Path) -> None:
    files = CurveFiles(str(tmp_path), "c1")
    log(files, range(10))
    files.append(1010.0, "g0-r0-p1", MetricsLogged(generation=0, rows=((10**400, {"loss": 1.0}),)))
    files.fold(files.begin_next())
    log(files, range(11, 20))
    assert steps_of(tmp_path) == [*range(10), *range(11, 20)]
    assert read_curves(str(tmp_path)).dropped["curves"].count == 1


def test_no_flipped_bit_of_what_is_kept_hides_a_value_unsaid(tmp_path: Path) -> None:
    """In the line that names what was folded, one hid all newer values, and had them removed."""
    files = CurveFiles(str(tmp_path), "c1")
    log(files, range(10))
    files.fold(files.begin_next())
    log(files, range(10, 20))
    kept = tmp_path / "kept"
    whole = kept.read_bytes()
    for bit in range(8 * (whole.index(b"\n") + 1)):
        data = bytearray(whole)
        data[bit // 8] ^= 1 << bit % 8
        kept.write_bytes(data)
        assert steps_of(tmp_path) == [*range(20)] or read_curves(str(tmp_path)).dropped, bit


def test_what_cannot_be_folded_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "NEW_BYTES_MAX", 2000)
    files = CurveFiles(str(tmp_path), "c1")
    log(files, range(100))
    (path,) = tmp_path.iterdir()
    assert path.stat().st_size <= 2000
    files.begin_next()
    log(files, range(100, 101))
    lost = read_curves(str(tmp_path)).dropped["g0-r0-p1"].count
    assert lost + 2 * len(steps_of(tmp_path)) == 202
