"""PyTorch's published examples, with a device patch of at most five lines each.

They are not part of this repository: `PERDURE_EXAMPLES` names a checkout of pytorch/examples
(tried with commit 77f55b9). The patches beside this file let them run without accelerators.
"""

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.harness import Job
from tests.third_party.test_third_party import start  # noqa: F401  (a fixture)

PATCHES = Path(__file__).resolve().parent / "patches"
EXAMPLES = os.environ.get("PERDURE_EXAMPLES", "")
pytestmark = [pytest.mark.slow, pytest.mark.serial, pytest.mark.torch]
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
