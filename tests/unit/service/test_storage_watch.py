"""Checkpoints on a disk: found, judged, told of once, pruned by a command."""

import asyncio
import json
import shutil
import threading
from pathlib import Path

import pytest
from tests.waiting import PATIENCE_S

from perdure.adapters import storage
from perdure.cli.app import run_command
from perdure.model.checkpoints import FileEntry, Manifest, name_checkpoint
from perdure.model.codec import encode
from perdure.model.events import RoomNoted
from perdure.model.job import CheckpointConfig, JobSpec
from perdure.plan.checkpoints import RESERVE_BYTES, FreeSpace
from perdure.service import storage_watch
from perdure.service.jobfiles import write_document
from perdure.service.jobfolders import paths_of


def save(root: Path, step: int, loss: float, size: int = 1000) -> None:
    folder = root / name_checkpoint(step)
    folder.mkdir(parents=True)
    (folder / "__0_0.distcp").write_bytes(bytes(size))
    files = (FileEntry("__0_0.distcp", size, "x"),)
    manifest = Manifest(step=step, world_size=1, files=files, metrics={"loss": loss})
    (folder / "manifest.json").write_bytes(encode(manifest))


def test_checkpoints_are_found_with_the_best_and_the_damaged(tmp_path: Path) -> None:
    for step, loss in ((10, 0.5), (20, 0.1), (30, 0.3)):
        save(tmp_path, step, loss)
    (tmp_path / name_checkpoint(30) / "__0_0.distcp").write_bytes(b"cut short")
    (tmp_path / "step-00000040.g1.tmp").mkdir()
    found = storage.list_stored(tmp_path, "loss")
    assert [(one.step, one.best, one.whole) for one in found] == [
        (10, False, True),
        (20, True, True),
        (30, False, False),
    ]
    load = storage.estimate_load(found)
    assert load is not None
    assert (load.files, load.bytes > 1000) == (3, True)
    assert storage.list_stored(tmp_path / "none") == []


def test_a_worsening_is_told_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = JobSpec(script="x", checkpoint=CheckpointConfig(url=str(tmp_path)))
    save(tmp_path, 10, 0.5, size=10**6)
    watch = storage_watch.StorageWatch(spec, paths_of(str(tmp_path), "j"))
    noted: list[RoomNoted | None] = []
    for number, free in enumerate((10**9, 2 * 10**6, 2 * 10**6, 10**5, 10**9)):
        left = FreeSpace(bytes=RESERVE_BYTES + free, inodes=-1)
        monkeypatch.setattr(storage_watch, "read_free_space", lambda place, left=left: left)
        now = number * storage_watch.LOOK_S
        noted += [watch.look(now), watch.look(now + 0.1)]
    events = [event for event in noted if event is not None]
    said = [storage_watch.describe(event, "j") for event in events]
    assert {event.place for event in events} == {str(tmp_path)}
    assert [line.split(":")[0] for line in said] == [
        "storage is low", "storage is short", "storage is well again",
    ]  # fmt: skip


def test_prune_shows_before_it_removes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PERDURE_HOME", str(tmp_path))
    paths = paths_of(str(tmp_path), "j")
    root = Path(paths.checkpoints)
    for step in (10, 20, 30):
        save(root, step, 0.1)
    (root / "metrics.json").write_text("{}")
    write_document(paths.spec, JobSpec(name="j", script="x"))
    wanted = shutil.disk_usage(tmp_path).total / 1e9 + 1
    words = ["rm", "j", "--checkpoints-until", str(wanted), "--json"]
    assert run_command(words) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["applied"], answer["steps"]) == (False, [10, 20])
    assert (root / name_checkpoint(10)).is_dir()
    assert run_command([*words, "--yes"]) == 0
    assert sorted(path.name for path in root.iterdir()) == ["metrics.json", name_checkpoint(30)]


def test_what_could_not_be_removed_is_not_said_to_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PERDURE_HOME", str(tmp_path))
    paths, root = paths_of(str(tmp_path), "j"), tmp_path / "there"
    paths_spec = JobSpec(name="j", script="x", checkpoint=CheckpointConfig(url=str(root)))
    Path(paths.spec).parent.mkdir(parents=True)
    write_document(paths.spec, paths_spec)
    for step in (10, 20):
        save(root, step, 0.5)

    def refuse(folder: Path) -> None:
        raise PermissionError(13, "Permission denied", str(folder))

    monkeypatch.setattr(shutil, "rmtree", refuse)
    assert run_command(["rm", "j", "--checkpoints-until", "1000000", "--yes"]) == 3
    out = capsys.readouterr()
    assert "removed step" not in out.out
    assert "Permission denied" in out.err


def test_a_disk_that_is_away_keeps_a_job_from_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    back = threading.Event()

    def look(watch: storage_watch.StorageWatch, now: float) -> None:
        back.wait()

    monkeypatch.setattr(storage_watch.StorageWatch, "look", look)
    spec = JobSpec(name="j", script="t.py")
    paths = paths_of(str(tmp_path), "j")

    async def run() -> None:
        watching = asyncio.create_task(
            storage_watch.watch_free_space(spec, paths, lambda: 0.0, pytest.fail, pytest.fail)
        )
        await asyncio.sleep(0)  # The look is asked for, and does not return.
        watching.cancel()

    ending = threading.Thread(target=lambda: asyncio.run(run()), daemon=True)
    ending.start()
    ending.join(PATIENCE_S)
    alive = ending.is_alive()
    back.set()
    assert not alive
