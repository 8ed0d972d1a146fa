"""Files that were pulled are loaded as data; what would run code is refused without a flag."""

import json
import pickle
import subprocess
import sys
import zipfile
from pathlib import Path
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
