"""A job whose agents are in a container on a real Slurm, and what asks Slurm is outside.

The container is a mount namespace in which Slurm's commands do not work and a mark can be read.
"""

import shlex
import sys
from pathlib import Path

import pytest

from tests.e2e.harness import SCRIPTS
from tests.platforms.slurm_cluster import Cluster
from tests.platforms.slurm_site import Site, make_words
from tests.platforms.test_slurm_nodes import put_back

pytestmark = [pytest.mark.serial, pytest.mark.timeout(590)]
STEPS = 60
INSIDE = """\
#!/bin/sh
for name in scontrol srun; do mount --bind /bin/false "$(command -v $name)"; done
mount -t tmpfs none {mark} && touch {mark}/inside
exec "$@"
"""
SCRIPT = """\
import os, runpy, subprocess, sys
if not os.path.exists({mark!r}) or subprocess.run(["scontrol", "ping"]).returncode == 0:
    sys.exit("not in the container")
runpy.run_path({script!r}, run_name="__main__")
"""


@pytest.mark.parametrize("nodes", [1, 2])
def test_agents_are_in_the_container_and_the_job_is_put_back_from_outside(
    cluster: Cluster, place: Path, nodes: int
) -> None:
    mark, inside, script = place / "mark", place / "inside.sh", place / "train.py"
    mark.mkdir()
    inside.write_text(INSIDE.format(mark=shlex.quote(str(mark))))
    inside.chmod(0o755)
    exact = str(SCRIPTS / "train_exact.py")
    script.write_text(SCRIPT.format(mark=str(mark / "inside"), script=exact))
    container = f"unshare --mount {inside}"
    site = Site(cluster, place, container=container, container_python=sys.executable)
    job = site.launch(script, *make_words(place, STEPS, 0.2), nproc=1, nodes=nodes)
    site.wait_step(20)
    put_back(cluster, job)
    cluster.start_now(job)
    site.wait_state(job, "COMPLETED", 300)
    assert [run["state"] for run in site.runs()] == ["stopped", "done"]
    site.check_equal(STEPS, nodes)


def test_a_container_that_is_not_to_be_had_is_told(cluster: Cluster, place: Path) -> None:
    site = Site(cluster, place, container_image="docker://torch")
    site.write(SCRIPTS / "train_exact.py", name="job", nproc=1)
    refused = site.perdure("launch", "job.json", "--on", "site.toml")
    assert (refused.returncode, "Pyxis is not installed" in refused.stderr) == (4, True)
    site.settings.pop("container_image")
    site.settings["container"] = "apptainer-of-nowhere exec image.sif"
    job = site.launch(SCRIPTS / "train_exact.py", nproc=1)
    site.wait_state(job, "FAILED")
    (output,) = (place / "project").glob("slurm-job-*.out")
    assert "apptainer-of-nowhere is not there" in output.read_text()
    assert cluster.job(job)["ExitCode"] == "3:0"
