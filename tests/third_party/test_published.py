"""PyTorch's published examples, with a device patch of at most five lines each.

They are not part of this repository: `PERDURE_EXAMPLES` names a checkout of pytorch/examples
(tried with commit 77f55b9). The patches beside this file let them run without accelerators.
`PERDURE_TORCHFT` names one of pytorch/torchft (73dafea), whose DiLoCo example needs no patch.
"""

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.harness import Job
from tests.third_party.test_third_party import start  # noqa: F401  (a fixture)

PATCHES = Path(__file__).resolve().parent / "patches"
EXAMPLES, TORCHFT = os.environ.get("PERDURE_EXAMPLES", ""), os.environ.get("PERDURE_TORCHFT", "")
DILOCO = Path(__file__).resolve().parent / "scripts" / "published_diloco.py"
pytestmark = [pytest.mark.slow, pytest.mark.torch]
needs_examples = pytest.mark.skipif(
    not EXAMPLES, reason="PERDURE_EXAMPLES names no checkout of pytorch/examples"
)


def prepare(folder: str, script: str, tmp_path: Path) -> Path:
    """Copy one example, patch its Python files, and return the path of its script."""
    copy = tmp_path / folder
    shutil.copytree(Path(EXAMPLES) / "distributed" / folder, copy)
    files = sorted(str(path) for path in copy.rglob("*.py"))
    subprocess.run(["sed", "-i", "-f", PATCHES / f"{folder}.sed", *files], check=True)
    return copy / script


@pytest.mark.parametrize("path", sorted(PATCHES.glob("*.sed")), ids=lambda path: path.stem)
def test_a_patch_has_at_most_five_lines(path: Path) -> None:
    lines = path.read_text().splitlines()
    assert 1 <= len(lines) <= 5
    assert all(line.startswith("s/") for line in lines)


@needs_examples
@pytest.mark.parametrize(("folder", "script"), [("ddp", "example.py"), ("FSDP2", "example.py")])
def test_it_runs(
    start: Callable[..., Job],  # noqa: F811
    tmp_path: Path,
    folder: str,
    script: str,
) -> None:
    job = start(folder, "-n", "2", str(prepare(folder, script, tmp_path)))
    assert job.wait() == 0, job.text()[-4000:]


@needs_examples
def test_the_ddp_tutorial_resumes_from_its_snapshot(
    start: Callable[..., Job],  # noqa: F811
    tmp_path: Path,
) -> None:
    script = prepare("ddp-tutorial-series", "multigpu_torchrun.py", tmp_path)
    job = start("tutorial", "-n", "2", str(script), "200", "2")
    job.wait_until(lambda: "Epoch 30 |" in job.text(), "epoch 30")
    job.kill("perdure rank tutorial g0 r1")
    assert job.wait() == 0, job.text()[-4000:]
    assert "Resuming training from snapshot" in job.text()


@pytest.mark.skipif(not TORCHFT, reason="PERDURE_TORCHFT names no checkout of pytorch/torchft")
def test_torchfts_diloco_loses_a_group_and_all_outer_states_are_equal(
    start: Callable[..., Job],  # noqa: F811
    tmp_path: Path,
) -> None:
    log = tmp_path / "log"
    log.mkdir()
    words = ("--torchft", "--replicas", "3", "-n", "1")
    example = str(Path(TORCHFT) / "train_diloco.py")
    job = start("diloco", *words, str(DILOCO), example, str(log), "0.05")

    def rows(group: int) -> list[dict[str, Any]]:
        path = log / f"group-{group}.jsonl"
        text = path.read_text() if path.exists() else ""
        return [json.loads(line) for line in text.splitlines(True) if line.endswith("\n")]

    job.wait_until(lambda: len(rows(1)) >= 3, "3 steps")
    first = rows(1)[-1]
    os.kill(first["pid"], signal.SIGKILL)
    assert job.wait() == 0, job.text()[-4000:]
    survivors = [{row["pid"] for row in rows(group)} for group in (0, 2)]
    assert [len(pids) for pids in survivors] == [1, 1], "no survivor was started again"
    healed = [row for row in rows(1) if row["pid"] != first["pid"]]
    assert healed[0]["step"] > first["step"] + 1
    states: dict[int, list[str]] = {}
    for group in range(3):
        for row in rows(group):
            states.setdefault(row["step"], []).append(row.get("hash", "failed"))
    assert len(states[healed[-1]["step"]]) == 3
    assert all(len({h for h in found if h != "failed"}) == 1 for found in states.values())
