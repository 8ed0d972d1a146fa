"""Copies of a script's own checkpoints: each format comes back whole, and nothing else does."""

import os
from pathlib import Path
from urllib.parse import quote

import fsspec
import pytest

pytest.importorskip("torch")
from tests.unit.test_own import FORMATS, make

from perdure.adapters.own_away import OwnAway
from perdure.files.own import find_newest
from perdure.model.codec import encode
from perdure.model.errors import PlatformError

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore:torch.distributed is")]


@pytest.fixture(params=["file", "memory"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path / "store") if request.param == "file" else f"memory://{tmp_path.name}/run"


def locate(url: str, pattern: str) -> str:
    return f"{url}/own-j/{quote(pattern, safe='')}"


def upload(url: str, cwd: Path, pattern: str) -> OwnAway:
    away = OwnAway(url, "j", pattern, str(cwd))
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
    away = OwnAway(url, "j", pattern, str(there))
    fetched = away.fetch(60.0)
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
    fs, base = fsspec.core.url_to_fs(locate(url, "out/ckpt-1.pt"))
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
    away = OwnAway(url, "j", "out/checkpoint-*", str(there))
    assert away.fetch(60.0) == "", "there is none"
    upload(url, here, "out/checkpoint-*")
    fs, base = fsspec.core.url_to_fs(locate(url, "out/checkpoint-*"))
    (name,) = [row for row in fs.ls(base, detail=False) if not row.endswith("latest")]
    fs.pipe_file(f"{name}/=model.safetensors", b"x")
    with pytest.raises(PlatformError, match="does not match its hash"):
        away.fetch(60.0)
    fs.rm(f"{base}/latest")
    assert away.fetch(60.0) == "", "it was not tagged"
    assert not list((there / "out").glob("*")) if (there / "out").exists() else True
    assert not (there / "out.partial").exists()


def test_another_job_has_a_place_of_its_own(url: str, tmp_path: Path) -> None:
    make(tmp_path / "out", "torch.save", 1)
    upload(url, tmp_path, "out/ckpt-*.pt")
    assert OwnAway(url, "k", "out/ckpt-*.pt", str(tmp_path)).fetch(60.0) == ""


def test_a_manifest_that_names_a_file_elsewhere_is_refused(url: str, tmp_path: Path) -> None:
    make(tmp_path / "out", "torch.save", 1)
    away = upload(url, tmp_path, "out/ckpt-*.pt")
    fs, base = fsspec.core.url_to_fs(locate(url, "out/ckpt-*.pt"))
    (name,) = [row for row in fs.ls(base, detail=False) if not row.endswith("latest")]
    manifest = fs.cat_file(f"{name}/manifest.json").replace(b"ckpt-1.pt", b"../../x.pt")
    fs.pipe_file(f"{name}/manifest.json", manifest)
    with pytest.raises(PlatformError, match="has a segment"):
        away.fetch(60.0)


def test_a_manifest_that_names_a_file_of_the_script_is_refused(url: str, tmp_path: Path) -> None:
    """In the script's own folder, a file `torch.py` would be imported by the script."""
    make(tmp_path / "here", "torch.save", 1)
    upload(url, tmp_path / "here", "ckpt-*.pt")
    fs, base = fsspec.core.url_to_fs(locate(url, "ckpt-*.pt"))
    (name,) = [row for row in fs.ls(base, detail=False) if not row.endswith("latest")]
    manifest = fs.cat_file(f"{name}/manifest.json").replace(b"ckpt-1.pt", b"torch.py")
    fs.pipe_file(f"{name}/manifest.json", manifest)
    with pytest.raises(PlatformError, match=r"'torch.py', which ckpt-\*.pt is not"):
        fetch(url, tmp_path / "there", "ckpt-*.pt")
    assert os.listdir(tmp_path / "there") == []


def test_a_link_that_comes_with_a_copy_replaces_no_file(url: str, tmp_path: Path) -> None:
    make(tmp_path / "here", "torch.save", 1)
    upload(url, tmp_path / "here", "ckpt-*.pt")
    fs, base = fsspec.core.url_to_fs(locate(url, "ckpt-*.pt"))
    (name,) = [row for row in fs.ls(base, detail=False) if not row.endswith("latest")]
    links = ["train.py@", "torch.py@", "last.pt@", "latest.pt@", "last-v1.pt@"]
    fs.pipe_file(f"{name}/pointers", encode(links))
    there = tmp_path / "there"
    there.mkdir()
    for file in ("train.py", "last.pt"):
        (there / file).write_text("the script's own")
    (there / "latest.pt").symlink_to("ckpt-0.pt")
    fetch(url, there, "ckpt-*.pt")
    assert {file.name: os.readlink(file) for file in there.iterdir() if file.is_symlink()} == {
        "latest.pt": "ckpt-1.pt",
        "last-v1.pt": "ckpt-1.pt",
    }
    assert sorted(os.listdir(there)) == [
        "ckpt-1.pt",
        "last-v1.pt",
        "last.pt",
        "latest.pt",
        "train.py",
    ]


def fetch(url: str, cwd: Path, pattern: str, timeout_s: float = 60.0) -> str:
    cwd.mkdir(exist_ok=True)
    return OwnAway(url, "j", pattern, str(cwd)).fetch(timeout_s)


@pytest.mark.parametrize("form", ["Trainer", "torch.save"])
def test_of_two_nodes_with_one_folder_both_have_it(form: str, url: str, tmp_path: Path) -> None:
    pattern = "out/" + FORMATS[form][1].format("*")
    path = make(tmp_path / "here" / "out", form, 7)
    upload(url, tmp_path / "here", pattern)
    for _ in range(2):
        assert fetch(url, tmp_path / "there", pattern) == str(tmp_path / "there/out" / path.name)
    assert os.listdir(tmp_path / "there") == ["out"]


def test_what_the_script_has_saved_meanwhile_is_not_replaced(url: str, tmp_path: Path) -> None:
    path = make(tmp_path / "here" / "out", "torch.save", 1)
    upload(url, tmp_path / "here", "out/ckpt-1.pt")
    newer = tmp_path / "there" / "out" / path.name
    newer.parent.mkdir(parents=True)
    newer.write_bytes(b"newer")
    fetch(url, tmp_path / "there", "out/ckpt-1.pt")
    assert newer.read_bytes() == b"newer"


def test_a_copy_that_comes_late_is_dropped(url: str, tmp_path: Path) -> None:
    make(tmp_path / "here" / "out", "Trainer", 7)
    upload(url, tmp_path / "here", "out/checkpoint-*")
    with pytest.raises(TimeoutError):
        fetch(url, tmp_path / "there", "out/checkpoint-*", timeout_s=-1.0)
    assert os.listdir(tmp_path / "there") == []


def test_another_pattern_has_a_place_of_its_own(url: str, tmp_path: Path) -> None:
    make(tmp_path / "out", "torch.save", 1)
    upload(url, tmp_path, "out/ckpt-*.pt")
    assert fetch(url, tmp_path, "new/ckpt-*.pt") == ""


def test_a_checkpoint_may_have_a_manifest_a_pipe_and_a_link_to_nothing(
    url: str, tmp_path: Path
) -> None:
    path = make(tmp_path / "here" / "out", "Trainer", 7)
    (path / "manifest.json").write_text("{}")
    os.symlink("/nowhere", path / "gone")
    os.mkfifo(path / "pipe")
    upload(url, tmp_path / "here", "out/checkpoint-*")
    there = Path(fetch(url, tmp_path / "there", "out/checkpoint-*"))
    assert (there / "manifest.json").read_text() == "{}"
    assert not (there / "pipe").exists()
