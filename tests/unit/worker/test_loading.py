"""Files that were pulled are loaded as data; what would run code is refused without a flag."""

import copy
import json
import pickle
import subprocess
import sys
import warnings
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.waiting import PATIENCE_S

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch


class Harmful:
    def __reduce__(self) -> Any:
        return (open, ("harmed", "w"))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_plain_tensors_load_and_the_rest_is_named(tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    torch.save({"w": torch.ones(3)}, tmp_path / "good.pt")
    torch.save({"w": Harmful()}, tmp_path / "bad.pt")
    (tmp_path / "cut.pt").write_bytes((tmp_path / "good.pt").read_bytes()[:-200])
    for name in ("whole", "short"):
        dcp.save({"w": torch.ones(1000)}, checkpoint_id=tmp_path / name, no_dist=True)
    shard = next((tmp_path / "short").glob("*.distcp"))
    shard.write_bytes(shard.read_bytes()[:-100])
    names = ["good.pt", "whole", "bad.pt", "cut.pt", "short"]
    request = {"paths": [str(tmp_path / name) for name in names]}
    done = subprocess.run(
        [sys.executable, "-P", "-m", "perdure.worker.checkpoint.loading"],
        input=json.dumps(request), capture_output=True, text=True, timeout=PATIENCE_S, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert (told["loaded"], told["tensors"]) == (2, 2)
    assert [Path(text.split(" ")[0]).name for text in told["problems"]] == names[3:]
    (foreign,) = told["unknown"]  # It is no plain data, which is another thing than damage.
    assert "bad.pt (names " in foreign
    assert "open, which is no data: --allow-pickle would run it)" in foreign
    assert not (tmp_path / "harmed").exists()


def repack(path: Path, out: Path, kind: str) -> None:
    """Make an archive that loads as `path` does, and is far smaller than what it holds."""
    with zipfile.ZipFile(path) as source, zipfile.ZipFile(out, "w") as target:
        for one in source.infolist():
            compress = zipfile.ZIP_DEFLATED if kind == "compressed" else zipfile.ZIP_STORED
            target.writestr(one.filename, source.read(one), compress_type=compress)
        if kind == "shared":  # One record's bytes are those of a hundred.
            (largest,) = sorted(target.filelist, key=lambda one: -one.file_size)[:1]
            for number in range(100):
                twin = copy.copy(largest)
                twin.filename = f"{largest.filename.partition('/')[0]}/data/{number + 1000}"
                target.filelist.append(twin)
                target.NameToInfo[twin.filename] = twin


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("kind", ["compressed", "shared"])
@pytest.mark.parametrize("sharded", [False, True])
def test_an_archive_that_is_larger_than_its_file_is_refused_before_it_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, sharded: bool
) -> None:
    """A file of 1 MB took 1.28 GB."""
    from perdure.worker.checkpoint import loading

    torch.save({"w": torch.zeros(100_000)}, tmp_path / "good.pt")
    assert loading.load(tmp_path / "good.pt", allow_pickle=False) == 1
    repack(tmp_path / "good.pt", tmp_path / "bomb.pt", kind)
    assert loading._count(torch.load(tmp_path / "bomb.pt", weights_only=True)) == 1
    path = tmp_path / "bomb.pt"
    if sharded:
        import torch.distributed.checkpoint as dcp

        dcp.save({"w": torch.zeros(100_000)}, checkpoint_id=tmp_path / "shards", no_dist=True)
        path = tmp_path / "shards"
        place = SimpleNamespace(
            relative_path="bomb.pt", offset=0, length=(tmp_path / "bomb.pt").stat().st_size
        )
        (tmp_path / "bomb.pt").rename(path / "bomb.pt")
        index = SimpleNamespace(storage_data={0: place})
        monkeypatch.setattr(loading, "read_index", lambda folder: index)
    monkeypatch.setattr(torch, "load", lambda *args, **kinds: pytest.fail("it was loaded"))
    with pytest.raises(ValueError, match="compressed" if kind == "compressed" else "its records"):
        loading.load(path, allow_pickle=True)


def test_a_torchscript_program_is_named_as_one_though_its_sources_are_compressed(
    tmp_path: Path,
) -> None:
    from perdure.worker.checkpoint.loading import ForeignError, load

    path = tmp_path / "program.pt"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        layers = torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(9)))
        torch.jit.script(layers).save(path)
        with zipfile.ZipFile(path) as archive:
            assert any(one.compress_type for one in archive.infolist())
        with pytest.raises(ForeignError, match="is a TorchScript program"):
            load(path, allow_pickle=False)
        assert load(path, allow_pickle=True) == 18


def test_an_index_that_would_run_code_runs_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The index of a sharded checkpoint is a pickle, and it comes from another machine."""
    from perdure.worker.checkpoint.loading import load

    monkeypatch.chdir(tmp_path)
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Harmful()))
    with pytest.raises(pickle.UnpicklingError, match="the index names"):
        load(tmp_path, allow_pickle=True)
    assert not (tmp_path / "harmed").exists()


@pytest.mark.filterwarnings("ignore:'torch.load' received a zip file")
def test_a_torchscript_program_is_whole_and_is_no_data(tmp_path: Path) -> None:
    """P1: it was said to be damaged, and no flag could open the gate."""
    from perdure.worker.checkpoint.loading import ForeignError, load

    path = tmp_path / "program.pt"
    with zipfile.ZipFile(path, "w") as archive:
        for name in ("data.pkl", "constants.pkl", "version"):
            archive.writestr(f"program/{name}", b"3\n")
    with pytest.raises(ForeignError, match="TorchScript"):
        load(path, allow_pickle=False)
