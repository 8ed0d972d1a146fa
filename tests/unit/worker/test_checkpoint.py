"""Saving and restoring in one process: what is on disk decides, and a damaged file never wins."""

import io
import os
import random
import shutil
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import xxhash
from fsspec.implementations.local import LocalFileSystem
from msgspec import structs
from tests.disks import small_disk
from tests.waiting import PATIENCE_S, wait_until
from torch import nn

from perdure.adapters.checkpoints import verify_all
from perdure.model.checkpoints import FileEntry, Manifest
from perdure.model.codec import decode, encode
from perdure.model.errors import PlatformError
from perdure.model.events import CheckpointFailed, CheckpointRestored, CheckpointSaved
from perdure.model.job import CheckpointConfig
from perdure.model.records import encode_record
from perdure.worker import busy
from perdure.worker.attach import Attachment
from perdure.worker.checkpoint import Checkpointer, checkpointer
from perdure.worker.checkpoint.files import list_checkpoints
from perdure.worker.checkpoint.sharded import SavePlanCache
from perdure.worker.checkpoint.staging import Staging
from perdure.worker.ring import RingWriter
from perdure.worker.steering.cells import Cells
from perdure.worker.steering.executor import SaveSkipped


class Trainee:
    """A model with everything that has state, and its checkpointer."""

    def __init__(
        self,
        url: str,
        seed: int,
        generation: int = 0,
        rank: int = 0,
        world_size: int = 1,
        **config: Any,
    ) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(80, 80), nn.BatchNorm1d(80), nn.Dropout(0.5))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 3)
        self.events: list[Any] = []
        self.saver = Checkpointer(
            url=url,
            config=CheckpointConfig(**config),
            rank=rank,
            world_size=world_size,
            generation=generation,
            emit=self.events.append,
            now=lambda: 1.0,
        )
        self.saver.register("model", self.model)
        self.saver.register("optimizer", self.optimizer)
        self.saver.register("scheduler", self.scheduler)

    def train(self, steps: int) -> list[float]:
        losses = []
        for _ in range(steps):
            noise = random.random() + float(numpy.random.rand())
            loss = (self.model(torch.randn(16, 80)) * noise).square().mean()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.scheduler.step()
            losses.append(loss.item())
        return losses

    def save(self, step: int, **extra: Any) -> None:
        self.saver.save(step, reason="test", extra=extra)

    def of(self, kind: type) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]


def test_resumed_losses_are_bitwise_equal(tmp_path: Path) -> None:
    one = Trainee(str(tmp_path), seed=1)
    one.train(5)
    one.save(5, config={"epoch": 3})
    rest = one.train(10)  # The copy was made beside these steps; the gate kept it whole.
    one.saver.close()
    (saved,) = one.of(CheckpointSaved)
    assert saved.step == 5
    two = Trainee(str(tmp_path), seed=2)
    extra: dict[str, Any] = {}
    assert two.saver.restore(extra) == 5
    assert extra["config"] == {"epoch": 3}
    assert not two.of(CheckpointRestored)[0].why_not_exact
    assert two.train(10) == rest


def test_what_will_be_restored_can_be_asked_for_before(tmp_path: Path) -> None:
    one = Trainee(str(tmp_path), seed=1)
    assert one.saver.read_newest() == (0, {})
    one.train(5)
    one.save(5)
    one.saver.close()
    two = Trainee(str(tmp_path), seed=2)
    step, objects = two.saver.read_newest()
    assert (step, objects["scheduler"]) == (5, one.scheduler.state_dict())
    assert two.scheduler.last_epoch == 0, "asking restores nothing"
    one.save(6)
    one.saver.close()
    assert two.saver.restore({}) == 5, "not what was found"
    assert two.scheduler.last_epoch == 5


def test_nothing_to_restore_is_step_zero(tmp_path: Path) -> None:
    one = Trainee(str(tmp_path / "new"), seed=1)
    assert one.saver.restore({}) == 0
    assert one.of(CheckpointRestored)[0].path == ""


def two_checkpoints(folder: Path) -> list[Path]:
    one = Trainee(str(folder), seed=1)
    for step in (5, 10):
        one.train(5)
        one.save(step)
        one.saver.close()
    assert not one.of(CheckpointFailed)
    return [path for _, path in list_checkpoints(folder)]


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 16
    path.write_bytes(data)


@pytest.mark.parametrize("damage", ["truncated", "flipped", "missing", "no manifest"])
def test_damaged_checkpoint_is_skipped_with_the_reason(tmp_path: Path, damage: str) -> None:
    newest, _ = two_checkpoints(tmp_path)
    tensors = newest / "__0_0.distcp"
    match damage:
        case "truncated":
            os.truncate(tensors, 100)
        case "flipped":
            flip(tensors)
        case "missing":
            tensors.unlink()
        case _:
            (newest / "manifest.json").unlink()
    assert not verify_all(str(newest))[0].ok
    two = Trainee(str(tmp_path), seed=2)
    assert two.saver.restore({}) == 5
    (restored,) = two.of(CheckpointRestored)
    assert len(restored.skipped) == 1
    assert "step-00000010" in restored.skipped[0]


@pytest.mark.parametrize("way", ["plain", "link"])
def test_a_fifo_in_the_place_of_a_file_is_not_waited_for(tmp_path: Path, way: str) -> None:
    """Another user who may write into the folder has put it there, and into the roster."""
    newest, _ = two_checkpoints(tmp_path)
    fifo, path = tmp_path / "fifo", newest / "manifest.json"
    manifest = decode(path.read_bytes(), Manifest)
    empty = FileEntry("fifo", 0, xxhash.xxh3_128().hexdigest())
    path.write_bytes(encode(structs.replace(manifest, files=(*manifest.files, empty))))
    os.mkfifo(fifo)
    (newest / "fifo").symlink_to(fifo) if way == "link" else fifo.rename(newest / "fifo")
    two = Trainee(str(tmp_path), seed=2)
    assert two.saver.restore({}) == 5
    (restored,) = two.of(CheckpointRestored)
    assert "fifo cannot be read: it is a FIFO" in restored.skipped[0]


def test_a_copy_by_another_name_is_not_of_that_step(tmp_path: Path) -> None:
    newest, _ = two_checkpoints(tmp_path)
    shutil.copytree(newest, tmp_path / "step-00000900")
    two = Trainee(str(tmp_path), seed=2)
    assert two.saver.restore({}) == 10
    (restored,) = two.of(CheckpointRestored)
    assert "the manifest is of step 10" in restored.skipped[0]


@pytest.mark.skipif(os.geteuid() != 0, reason="another user's folder needs root")
@pytest.mark.parametrize("way", ["folder", "link"])
def test_nothing_is_written_where_another_user_leads(tmp_path: Path, way: str) -> None:
    """He has made the folder of the next save, or a link, and knows its name."""
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "thesis").write_text("whole")
    root = tmp_path / "checkpoints"
    planted = root / "step-00000010.g0.2.tmp"
    one = Trainee(str(root), seed=1)
    one.save(5)
    one.saver.close()
    if way == "link":
        planted.symlink_to(victim)
    else:
        planted.mkdir()
        (planted / "rank-0.pt").symlink_to(victim / "thesis")
    os.chown(planted, 61_184, 61_184, follow_symlinks=False)
    one.save(10)
    one.save(15)
    one.saver.close()
    (failed,) = one.of(CheckpointFailed)
    assert "belongs to another user" in failed.error
    assert [event.step for event in one.of(CheckpointSaved)] == [5, 15]
    assert [path.name for path in victim.iterdir()] == ["thesis"]
    assert (victim / "thesis").read_text() == "whole"


def test_a_save_removes_no_file_that_it_has_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another user replaces the folder of a save by a link while rank 0 gathers the parts."""
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "thesis").write_text("whole")

    def lead_away(folder: Path) -> object:
        for path in folder.iterdir():
            path.rename(victim / path.name)
        folder.rmdir()
        folder.symlink_to(victim)
        return read_index(folder)

    read_index = checkpointer.read_index
    monkeypatch.setattr(checkpointer, "read_index", lead_away)
    one = Trainee(str(tmp_path / "checkpoints"), seed=1)
    one.save(5)
    one.saver.close()
    assert (victim / "thesis").read_text() == "whole"


def take_away(path: Path) -> Path:
    """Have the system answer with an error at `path`; return where its content is now."""
    content = path.rename(path.with_name(f"{path.name}-content"))
    path.symlink_to(path)  # Too many levels of links: not "no such file".
    return content


def bring_back(path: Path, content: Path) -> None:
    path.unlink()
    content.rename(path)


def test_a_disk_that_is_away_is_waited_for(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """As a FUSE whose server has died, or an NFS: to begin at step 0 would lose the training."""
    disk = tmp_path / "disk"
    two_checkpoints(disk)
    content = take_away(disk)
    two = Trainee(str(disk), seed=2)
    with ThreadPoolExecutor() as pool:
        restored = pool.submit(two.saver.restore, {})
        wait_until(lambda: "checkpoints cannot be read" in capfd.readouterr().err, "a word")
        bring_back(disk, content)
        assert restored.result(PATIENCE_S) == 10
    assert two.of(CheckpointRestored)[0].skipped == ()


def test_a_mount_that_is_missing_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The folder below it is empty, and the job knows that it has saved there."""
    disk = tmp_path / "disk"
    newest, older = two_checkpoints(disk)
    monkeypatch.setenv("PERDURE_SPEC", str(tmp_path / "job.json"))
    saved = [{"step": 5, "path": str(older)}, {"step": 10, "path": str(newest)}]
    (tmp_path / "state.json").write_bytes(encode_record({"checkpoints": saved}))
    content = disk.rename(tmp_path / "content")
    disk.mkdir()
    two = Trainee(str(disk), seed=2)
    with ThreadPoolExecutor() as pool:
        restored = pool.submit(two.saver.restore, {})
        wait_until(lambda: "perdure saved step-00000010" in capfd.readouterr().err, "a word")
        disk.rmdir()
        content.rename(disk)
        assert restored.result(PATIENCE_S) == 10


def test_a_disk_that_stays_away_ends_the_rank_and_not_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = tmp_path / "disk"
    two_checkpoints(disk)
    take_away(disk)
    monkeypatch.setattr(busy, "FIRST_S", 0.001)
    with pytest.raises(PlatformError, match="no checkpoint can be read: Too many levels"):
        Trainee(str(disk), seed=2).saver.restore({})


def test_a_checkpoint_that_cannot_be_read_is_skipped_for_an_older_one_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpointer, "WAIT_S", 0.0)
    newest, older = two_checkpoints(tmp_path)
    take_away(newest / "__0_0.distcp")
    two = Trainee(str(tmp_path), seed=2)
    assert two.saver.restore({}) == 5
    (restored,) = two.of(CheckpointRestored)
    assert "its disk does not answer: Too many levels" in restored.skipped[0]
    take_away(older / "__0_0.distcp")
    with pytest.raises(PlatformError, match="no checkpoint can be read"):
        Trainee(str(tmp_path), seed=3).saver.restore({})


def test_a_step_of_nine_digits_is_newer_than_one_of_eight(tmp_path: Path) -> None:
    one = Trainee(str(tmp_path), seed=1)
    for step in (99_999_999, 100_000_000):
        one.train(1)
        one.save(step)
        one.saver.close()
    assert Trainee(str(tmp_path), seed=2).saver.restore({}) == 100_000_000


def test_half_written_checkpoint_is_never_seen_and_is_removed(tmp_path: Path) -> None:
    two_checkpoints(tmp_path)
    left = tmp_path / "step-00000015.g0.tmp"
    left.mkdir()
    (left / "__0_0.distcp").write_bytes(b"half")
    two = Trainee(str(tmp_path), seed=2, generation=1)
    assert two.saver.restore({}) == 10
    assert not left.exists()


def test_full_disk_fails_the_save_and_not_the_training(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk") as disk:
        one = Trainee(str(disk), seed=1)
        one.train(3)
        one.save(3)
        one.train(3)
        one.saver.close()
        (failed,) = one.of(CheckpointFailed)
        assert "No space left" in failed.error
        assert list_checkpoints(disk) == []
        assert list(disk.iterdir()) == []  # What it had written is gone again.


def test_place_that_cannot_be_written_fails_the_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """T3: that it failed is known, also where standard error is on the same full disk."""
    (tmp_path / "file").write_text("not a directory")
    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr(sys, "stderr", closed)
    one = Trainee(str(tmp_path / "file" / "below"), seed=1)
    one.train(1)
    one.save(1)
    one.saver.close()
    assert len(one.of(CheckpointFailed)) == 1


@pytest.mark.parametrize("reads", ["find_problem", "read_tensors"])
def test_a_rank_that_reads_a_checkpoint_is_busy_as_long_as_its_disk_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reads: str
) -> None:
    two_checkpoints(tmp_path / "place")
    ring = RingWriter.create(str(tmp_path / "ring"), rank=0, generation=0)
    monkeypatch.setattr(busy, "attach_ring", lambda: Attachment(ring))
    real, seen = getattr(checkpointer, reads), list[str]()

    def look(*of: Any) -> Any:
        seen.extend(name.decode() for _, _, name in busy._open.values())
        return real(*of)

    monkeypatch.setattr(checkpointer, reads, look)
    assert Trainee(str(tmp_path / "place"), seed=2).saver.restore({}) == 10
    assert set(seen) == {"restore"}
    assert not busy._open
    ring.close()


def test_retention_keeps_last_every_nth_and_best(tmp_path: Path) -> None:
    one = Trainee(str(tmp_path), seed=1, keep_last=2, keep_every_steps=4, keep_best="loss")
    for step in range(1, 9):
        one.train(1)
        one.save(step, metrics={"loss": 0.1 if step == 3 else float(step)})
        one.saver.close()
    assert [step for step, _ in list_checkpoints(tmp_path)] == [8, 7, 4, 3]
    assert (tmp_path / "latest").read_text() == "step-00000008"


def test_an_old_checkpoint_that_cannot_be_removed_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """It is no failure of the newest one. An NFS keeps files that another host has open."""
    one = Trainee(str(tmp_path), seed=1, keep_last=1)
    rmtree = shutil.rmtree

    def remove(path: Path, **options: Any) -> None:
        if path.name != "step-00000001":
            rmtree(path, **options)

    monkeypatch.setattr(shutil, "rmtree", remove)
    for step in range(1, 5):
        one.train(1)
        one.save(step)
        one.saver.close()
    assert [step for step, _ in list_checkpoints(tmp_path)] == [4, 1]
    assert len(one.of(CheckpointSaved)) == 4
    assert not one.of(CheckpointFailed)
    said = capfd.readouterr().err
    assert said.count("old checkpoints cannot be removed") == 1
    assert f"{tmp_path}/step-00000001 is still there" in said


def test_a_bucket_that_refuses_to_delete_fails_no_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PERDURE_SPEC", str(tmp_path / "here" / "job.json"))

    def refuse(*words: object, **options: object) -> None:
        raise PermissionError("Access Denied")

    monkeypatch.setattr(LocalFileSystem, "rm", refuse)
    one = Trainee(f"local://{tmp_path}/there", seed=1, keep_last=1)
    for step in range(1, 4):
        one.train(1)
        one.save(step)
        one.saver.close()
    assert len(one.of(CheckpointSaved)) == 3
    assert not one.of(CheckpointFailed)
    assert capfd.readouterr().err.count("cannot be removed: Access Denied") == 1
    assert not list((tmp_path / "here").rglob("*.tmp"))


def test_other_environment_is_resumed_but_not_called_exact(tmp_path: Path) -> None:
    two_checkpoints(tmp_path)
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        two = Trainee(str(tmp_path), seed=2)
        two.saver.restore({})
    finally:
        torch.set_num_threads(threads)
    (restored,) = two.of(CheckpointRestored)
    assert restored.why_not_exact
    assert "threads was" in restored.why_not_exact


def test_remote_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PERDURE_SPEC", str(tmp_path / "here" / "job.json"))
    url = f"local://{tmp_path}/there"
    one = Trainee(url, seed=1)
    one.train(3)
    one.save(3)
    rest = one.train(3)
    one.saver.close()
    (saved,) = one.of(CheckpointSaved)
    assert saved.path == f"{url}/step-00000003"
    monkeypatch.setenv("PERDURE_SPEC", str(tmp_path / "elsewhere" / "job.json"))
    two = Trainee(url, seed=2)
    assert two.saver.restore({}) == 3
    assert two.train(3) == rest


def test_rank_that_is_ahead_keeps_its_next_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 publishes step 1 (and cleans up) only once rank 1 has begun to write step 2."""
    ahead = threading.Event()
    publish, wait, came = checkpointer.publish, checkpointer.SaveTask._wait, []

    def publish_late(folder: Path, root: Path, step: int, manifest: Manifest) -> Path:
        if step == 1:
            came.append(ahead.wait(PATIENCE_S))
        return publish(folder, root, step, manifest)

    def wait_ahead(task: checkpointer.SaveTask, path: Path, rank: int, deadline_s: float) -> None:
        if (task._rank, task.step) == (1, 2):  # Its own plan of the next step is written.
            ahead.set()
        wait(task, path, rank, deadline_s)

    monkeypatch.setattr(checkpointer, "publish", publish_late)
    monkeypatch.setattr(checkpointer.SaveTask, "_wait", wait_ahead)
    monkeypatch.setattr(checkpointer, "TIMEOUT_S", PATIENCE_S)

    def save_twice(rank: int) -> list[Manifest | None]:
        staging, cache, done = Staging(), SavePlanCache(rank), []
        for step in (1, 2):
            task = checkpointer.SaveTask(
                root=tmp_path, remote=None, step=step, attempt=f"g0.{step}", rank=rank,
                world_size=2, reason="test", allow_pickle=False,
            )  # fmt: skip
            tensors = staging.begin({f"weight{rank}": torch.ones(8)}, ())
            done.append(task.write(staging, cache, tensors, {"fingerprint": {}, "extra": {}}))
        return done

    with ThreadPoolExecutor(2) as pool:
        published, _ = pool.map(save_twice, range(2), timeout=PATIENCE_S)
    assert [manifest and manifest.step for manifest in published] == [1, 2]
    assert came[0]


def test_rank_that_comes_after_rank_0_has_failed_does_not_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpointer, "TIMEOUT_S", 3600.0)
    first, late = (
        checkpointer.SaveTask(
            root=tmp_path, remote=None, step=1, attempt="g0.1", rank=rank, world_size=2,
            reason="test", allow_pickle=False,
        )
        for rank in range(2)
    )  # fmt: skip
    assert first.fail("its own state_dict() raised")
    staging = Staging()
    tensors = staging.begin({"weight": torch.ones(8)}, ())
    with pytest.raises(checkpointer.SaveAbandoned):
        late.write(staging, SavePlanCache(1), tensors, {"fingerprint": {}, "extra": {}})


def start_save(folder: Path, rank: int, marks: checkpointer.SaveMarks) -> checkpointer.SaveTask:
    task = checkpointer.SaveTask(
        root=folder, remote=None, step=1, attempt="g0.1", rank=rank, world_size=2,
        reason="test", allow_pickle=False, marks=marks,
    )  # fmt: skip
    staging = Staging()
    tensors = staging.begin({f"weight{rank}": torch.ones(8)}, ())
    task.write(staging, SavePlanCache(rank), tensors, {"fingerprint": {}, "extra": {}})
    return task


@pytest.fixture
def marks(monkeypatch: pytest.MonkeyPatch) -> checkpointer.SaveMarks:
    """What the ranks of one world share beside their disk, whose time limit never comes."""
    monkeypatch.setattr(checkpointer, "TIMEOUT_S", 3600.0)
    cells = Cells()
    return checkpointer.SaveMarks(lambda: cells, "g0")


@pytest.mark.parametrize("waits", [0, 1])
def test_a_rank_whose_disk_takes_nothing_ends_the_save_of_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, marks: checkpointer.SaveMarks, waits: int
) -> None:
    """D4: the disk is full for one rank, and has room again when the other rank comes."""
    fails = 1 - waits
    task = checkpointer.SaveTask(
        root=tmp_path / "full", remote=None, step=1, attempt="g0.1", rank=fails, world_size=2,
        reason="test", allow_pickle=False, marks=marks,
    )  # fmt: skip
    (tmp_path / "full").write_text("takes nothing")
    assert task.fail("No space left"), "its word has not arrived, so it reports the failure itself"
    with ThreadPoolExecutor() as pool, pytest.raises(checkpointer.SaveAbandoned):
        pool.submit(start_save, tmp_path / "room", waits, marks).result(PATIENCE_S)


def test_a_save_of_which_a_rank_has_exited_is_over(
    tmp_path: Path, marks: checkpointer.SaveMarks
) -> None:
    marks.mark_exited(1)
    with ThreadPoolExecutor() as pool, pytest.raises(PlatformError, match="rank 1 has exited"):
        pool.submit(start_save, tmp_path, 0, marks).result(PATIENCE_S)


def test_a_save_waits_for_all_ranks_together_and_names_the_one_that_is_late(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpointer, "TIMEOUT_S", 0.3)
    task = checkpointer.SaveTask(
        root=tmp_path, remote=None, step=1, attempt="g0.1", rank=0, world_size=2,
        reason="test", allow_pickle=False,
    )  # fmt: skip
    staging = Staging()
    tensors = staging.begin({"weight": torch.ones(8)}, ())
    with pytest.raises(checkpointer.PeerLate, match="rank 1 did not finish its share"):
        task.write(staging, SavePlanCache(0), tensors, {"fingerprint": {}, "extra": {}})
    assert task.name_wait() == "checkpoint, waits for rank 1"


@pytest.mark.parametrize("hung", [0, 1])
def test_ranks_save_together_again_once_the_disk_of_one_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hung: int
) -> None:
    """Ranks skip the saves that the disk of rank `hung` holds up."""
    answers, replace_file = threading.Event(), checkpointer.replace_file
    ranks = [Trainee(str(tmp_path), seed=1, rank=rank, world_size=2) for rank in range(2)]

    def replace_late(path: Path, data: bytes, **options: Any) -> None:
        if path.name == f"part-{hung}.json":
            assert answers.wait(PATIENCE_S)
        replace_file(path, data, **options)

    def save(step: int) -> list[bool]:
        begun = []
        for rank in ranks:
            try:
                rank.saver.save(step, reason="interval", extra={})
                begun.append(True)
            except SaveSkipped:
                begun.append(False)
        return begun

    monkeypatch.setattr(checkpointer, "replace_file", replace_late)
    monkeypatch.setattr(checkpointer, "WAIT_S", 0.1)
    assert save(1) == [True, True]
    wait_until(lambda: (tmp_path / "step-00000001.g0.1.tmp" / f"part-{1 - hung}.json").exists())
    assert save(2)[hung] is False
    assert save(3) == [False, False] if hung == 0 else save(3)[hung] is False
    answers.set()
    for rank in ranks:
        rank.saver.close()
    assert [rank.saver.unbegun for rank in ranks] == [3, 3], "both know at the end of training"
    assert save(4) == [True, True]
    for rank in ranks:
        rank.saver.close()
    saved = ranks[0].of(CheckpointSaved)
    assert [event.step for event in saved] == [1, 4]
    assert saved[0].skipped == 2
    assert not ranks[0].of(CheckpointFailed)
    assert not list(tmp_path.glob("*.tmp"))


def test_checkpoint_that_is_not_written_at_the_end_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The wait has an end, also where every touch of the disk hangs; no thread keeps a process."""
    answers, one = threading.Event(), Trainee(str(tmp_path), seed=1)

    def hang(_task: object, staging: Staging, *_: object) -> None:
        staging.copy.make()
        assert answers.wait(PATIENCE_S)

    monkeypatch.setattr(checkpointer.SaveTask, "write", hang)
    monkeypatch.setattr(busy, "FIRST_S", 0.2)
    one.save(1)
    one.saver.close()
    (failed,) = one.of(CheckpointFailed)
    assert (failed.step, failed.writing) == (1, 1)
    assert "still being written" in failed.error
    assert "there is none" in capsys.readouterr().err
    with pytest.raises(SaveSkipped):
        one.saver.save(2, reason="stop", extra={})
    answers.set()
    monkeypatch.setattr(busy, "FIRST_S", PATIENCE_S)
    one.saver.close()


def test_place_that_hangs_where_a_state_cannot_be_taken_holds_up_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers, one = threading.Event(), Trainee(str(tmp_path), seed=1)

    def hang(*_: object) -> str:
        assert answers.wait(PATIENCE_S)
        return "it hung"

    monkeypatch.setattr(checkpointer.SaveTask, "explain", hang)
    monkeypatch.setattr(one.model, "state_dict", None)
    one.save(1)
    assert not one.of(CheckpointFailed)
    answers.set()
    one.saver.close()
    assert [event.error for event in one.of(CheckpointFailed)] == ["it hung"]
