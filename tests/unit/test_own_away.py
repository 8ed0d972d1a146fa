"""Copies of a script's own checkpoints: each format comes back whole, and nothing else does."""

import asyncio
import os
import time
from pathlib import Path

import fsspec
import pytest

pytest.importorskip("torch")
from tests.unit.test_own import FORMATS, make
from tests.waiting import wait_until

from perdure.adapters.own_away import OwnAway
from perdure.files.own import find_newest
from perdure.model.errors import PlatformError
from perdure.model.job import CheckpointConfig, JobSpec
from perdure.service.agent.outbox import Outbox
from perdure.service.agent.own import OwnCheckpoints

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore:torch.distributed is")]


@pytest.fixture(params=["file", "memory"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path / "store") if request.param == "file" else f"memory://{tmp_path.name}/run"


def upload(url: str, cwd: Path, pattern: str) -> OwnAway:
    away = OwnAway(url, "j", 0, pattern, str(cwd))
    whole = find_newest(pattern, str(cwd))[1]
    assert whole is not None
    assert away.upload(whole)
    assert not away.upload(whole), "it is there"
    return away


@pytest.mark.parametrize("form", FORMATS)
def test_each_format_comes_to_another_machine(form: str, url: str, tmp_path: Path) -> None:
    pattern = "out/" + FORMATS[form][1].format("*")
    here, there = tmp_path / "here", tmp_path / "there"
    path = make(here / "out", form, 7)
    upload(url, here, pattern)
    there.mkdir()
    away = OwnAway(url, "j", 0, pattern, str(there))
    fetched = away.fetch()
    assert fetched == str(there / "out" / path.name)
    torn, whole = find_newest(pattern, str(there))
    assert not torn
    assert whole is not None
    assert (whole.path, whole.step) == (fetched, 7)
    assert abs(whole.written_s - find_newest(pattern, str(here))[1].written_s) < 0.01
    assert sorted(os.listdir(there)) == ["out"]
    if form == "DeepSpeed":
        assert (there / "out" / "latest").read_text() == path.name


def test_a_file_that_is_overwritten_has_whole_copies_all_the_time(url: str, tmp_path: Path) -> None:
    here = tmp_path / "here"
    fs, base = fsspec.core.url_to_fs(f"{url}/own-j/0")
    for step in range(1, 5):
        path = make(here / "out", "torch.save", 1)
        os.utime(path, (1000.0 + step, 1000.0 + step))
        upload(url, here, "out/ckpt-1.pt")
        names = sorted(row.rsplit("/", 1)[-1] for row in fs.ls(base, detail=False))
        kept = [f"{1000 * (1000 + n):013}" for n in (step - 1, step) if n]
        assert names == [*kept, "latest"]
        assert fs.cat_file(f"{base}/latest").decode() == kept[-1]


def test_a_copy_that_was_cut_off_or_altered_is_not_taken(url: str, tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    there.mkdir()
    make(here / "out", "Trainer", 7)
    away = OwnAway(url, "j", 0, "out/checkpoint-*", str(there))
    assert away.fetch() == "", "there is none"
    upload(url, here, "out/checkpoint-*")
    fs, base = fsspec.core.url_to_fs(f"{url}/own-j/0")
    (name,) = [row for row in fs.ls(base, detail=False) if not row.endswith("latest")]
    fs.pipe_file(f"{name}/model.safetensors", b"x")
    with pytest.raises(PlatformError, match="does not match its hash"):
        away.fetch()
    fs.rm(f"{base}/latest")
    assert away.fetch() == "", "it was not tagged"
    assert not list((there / "out").glob("*")) if (there / "out").exists() else True
    assert not (there / "out.fetched").exists()


def test_another_job_has_a_place_of_its_own(url: str, tmp_path: Path) -> None:
    make(tmp_path / "out", "torch.save", 1)
    upload(url, tmp_path, "out/ckpt-*.pt")
    assert OwnAway(url, "k", 0, "out/ckpt-*.pt", str(tmp_path)).fetch() == ""


def test_a_manifest_that_names_a_file_elsewhere_is_refused(url: str, tmp_path: Path) -> None:
    make(tmp_path / "out", "torch.save", 1)
    away = upload(url, tmp_path, "out/ckpt-*.pt")
    fs, base = fsspec.core.url_to_fs(f"{url}/own-j/0")
    (name,) = [row for row in fs.ls(base, detail=False) if not row.endswith("latest")]
    manifest = fs.cat_file(f"{name}/manifest.json").replace(b"ckpt-1.pt", b"../../x.pt")
    fs.pipe_file(f"{name}/manifest.json", manifest)
    with pytest.raises(PlatformError, match="has a segment"):
        away.fetch()


def test_a_copy_of_another_pattern_is_not_taken(url: str, tmp_path: Path) -> None:
    """A job file may name its patterns in another order."""
    make(tmp_path / "here" / "ema", "torch.save", 7)
    upload(url, tmp_path / "here", "ema/ckpt-*.pt")
    with pytest.raises(PlatformError, match="ema/ckpt"):
        OwnAway(url, "j", 0, "out/ckpt-*.pt", str(tmp_path / "there")).fetch()
    assert not (tmp_path / "there").exists()


async def test_a_pattern_that_cannot_be_copied_delays_no_other_one(tmp_path: Path) -> None:
    for name in ("ema", "out"):
        make(tmp_path / name, "torch.save", 7)
    (tmp_path / "store/own-j").mkdir(parents=True)
    (tmp_path / "store/own-j/0").touch()
    checkpoint = CheckpointConfig(
        url=str(tmp_path / "store"), own=("ema/ckpt-*.pt", "out/ckpt-*.pt")
    )
    spec = JobSpec(name="j", script="t.py", cwd=str(tmp_path), checkpoint=checkpoint)
    outbox = Outbox(None, "events", node=0, source="agent-0")
    own = OwnCheckpoints(spec, 0, outbox, now=time.monotonic)
    copying = asyncio.create_task(own.keep_away(lambda: True))
    latest = tmp_path / "store/own-j/1/latest"
    await asyncio.to_thread(wait_until, latest.exists, "the copy of the second pattern")
    copying.cancel()
