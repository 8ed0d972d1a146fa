"""When a rank may come from the image, and what the image may import."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from tests.waiting import PATIENCE_S

from perdure.keeper import execution as launch
from perdure.keeper.image import zygote_environ
from perdure.keeper.json_lines import LineSocket
from perdure.model.bus.wire import KeeperKill, KeeperStatus, ToKeeper
from perdure.model.errors import ProtocolError
from perdure.model.nccl import SUPERVISED, mark_defaults
from perdure.worker.start import imports


def test_variables_that_the_image_has_read() -> None:
    image = {"PYTHONHASHSEED": "1", "HOME": "/a", "OMP_NUM_THREADS": "1"}
    assert launch.find_difference(image, image | {"RANK": "0", "OMP_NUM_THREADS": "4"}) == ""
    assert launch.find_difference(image, {**image, "TORCH_LOGS": "all"}) == "TORCH_LOGS"
    assert launch.find_difference(image, {"HOME": "/a"}) == "PYTHONHASHSEED"
    rank = {"TORCH_LOGS": "all", "RANK": "0"}
    env = launch.adopt_difference(image, rank)
    assert env == {"HOME": "/a", "OMP_NUM_THREADS": "1", "TORCH_LOGS": "all"}
    assert launch.find_difference(env, rank) == ""


def test_what_torch_s_nccl_is_told_starts_no_rank_cold() -> None:
    assert launch.find_difference({}, mark_defaults({}, SUPERVISED)) == ""
    own = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}
    assert launch.find_difference(own, own | mark_defaults(own, SUPERVISED)) == ""


def test_environment_of_the_image() -> None:
    spec = json.dumps({"script": "x", "nproc": 2, "env": {"A": "b"}}).encode()
    assert zygote_environ({"C": "d"}, spec) == {"A": "b", "C": "d", "OMP_NUM_THREADS": "1"}
    assert zygote_environ({"OMP_NUM_THREADS": "3"}, spec)["OMP_NUM_THREADS"] == "3"
    assert zygote_environ({"C": "d"}, "not json") == {"C": "d"}


@pytest.mark.parametrize("safe", ["", "1"])
def test_path_of_the_image(tmp_path: Path, safe: str) -> None:
    """PYTHONSAFEPATH leaves out the folder of the script, so nothing has to be taken out again."""
    package = tmp_path / "perdure" / "keeper"
    package.mkdir(parents=True)
    for folder in (package, package.parent):
        (folder / "__init__.py").touch()
    told = "import os, sys\ndef main(job, node, fd): os.write(fd, sys.path[0].encode())\n"
    (package / "entry.py").write_text(told)
    env = {"PYTHONPATH": str(tmp_path), "PYTHONSAFEPATH": safe}
    pid, ours = launch.start_image("j", 0, env)
    with ours:
        ours.settimeout(PATIENCE_S)
        assert ours.recv(1000).decode() == str(tmp_path)
    os.waitpid(pid, 0)


@pytest.mark.parametrize(
    ("own", "seen"), [({}, "1"), ({"PYTORCH_NVML_BASED_CUDA_CHECK": "0"}, "0")]
)
def test_who_asks_the_image_for_gpus_makes_no_context(
    own: dict[str, str], seen: str, tmp_path: Path
) -> None:
    package = tmp_path / "perdure" / "keeper"
    package.mkdir(parents=True)
    for folder in (package, package.parent):
        (folder / "__init__.py").touch()
    told = "os.environ.get('PYTORCH_NVML_BASED_CUDA_CHECK', 'none').encode()"
    (package / "entry.py").write_text(f"import os\ndef main(j, n, fd): os.write(fd, {told})\n")
    pid, ours = launch.start_image("j", 0, {"PYTHONPATH": str(tmp_path), **own})
    with ours:
        ours.settimeout(PATIENCE_S)
        assert ours.recv(1000).decode() == seen
    os.waitpid(pid, 0)


def test_only_what_is_installed_is_preloaded(tmp_path: Path) -> None:
    names = imports.list_preloadable(imports.list_installed_folders(), str(tmp_path))
    assert "msgspec" in names
    assert "perdure.worker.start.imports" in names
    assert not {__name__, "__main__", "pytest", "sys"} & set(names)
    own = str(Path(imports.__file__).parent)
    assert "perdure.worker.start.imports" not in imports.list_preloadable(
        imports.list_installed_folders(), own
    )


def test_list_of_imports(tmp_path: Path) -> None:
    path = str(tmp_path / "imports.json")
    assert imports.read_imports(path) == ()
    imports.write_imports(path, ["a", "wandb.sdk", "b.c"])
    assert imports.read_imports(path) == ("a", "b.c")
    Path(path).write_text("{")
    assert imports.read_imports(path) == ()


def test_lines() -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        lines = LineSocket(ours)
        theirs.sendall(b'{"type":"KeeperStatus"}\n{"type":"KeeperKill","gene')
        assert lines.read(ToKeeper) == [KeeperStatus()]
        theirs.sendall(b'ration":3}\n')
        assert lines.read(ToKeeper) == [KeeperKill(3)]
        for _ in range(40):
            lines.send(["x" * 100_000])
        assert lines.wants_write
        theirs.sendall(b"nonsense\n")
        with pytest.raises(ProtocolError):
            lines.read(ToKeeper)
    lines.flush()
    assert lines.closed
    lines.close()


def test_keeper_needs_no_torch() -> None:
    program = "import sys, perdure.keeper.keeper; sys.exit('torch' in sys.modules)"
    assert (
        subprocess.run([sys.executable, "-c", program], timeout=PATIENCE_S, check=False).returncode
        == 0
    )
