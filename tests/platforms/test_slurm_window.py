"""A save of a script takes 80 % of what a real Slurm leaves it, and is complete."""

import io
import zipfile
from pathlib import Path

import pytest

from perdure.files.own import examine
from tests.platforms.slurm_cluster import Cluster
from tests.platforms.slurm_site import Site

pytestmark = [pytest.mark.serial, pytest.mark.timeout(900)]
KILL_WAIT_S, WARN_S = 30, 45
"""Slurm's KillWait on this cluster, and the profile's warning."""
SAVES = """
import glob, os, signal, sys, time
out, data, save_s = sys.argv[1], open(sys.argv[2], "rb").read(), float(sys.argv[3])
rank = os.environ.get("RANK", "0")
found = glob.glob(f"{out}/*.pt")
print("begins at", found, flush=True)
if found:
    sys.exit(0)
def save(*_):
    os.makedirs(out, exist_ok=True)
    with open(f"{out}/step-1-rank{rank}.pt", "wb", buffering=0) as file:
        for at in range(0, len(data), len(data) // 20):
            file.write(data[at : at + len(data) // 20])
            time.sleep(save_s / 20)
    os._exit(0)
signal.signal(signal.SIGTERM, save)
open(f"{out}-{rank}-ready", "w").close()
while True:
    time.sleep(0.05)
"""


def write_script(place: Path) -> Path:
    """Write the script, and the bytes of a file of `torch.save` for it."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("x/data.pkl", b"x" * 4000)
    (place / "data").write_bytes(buffer.getvalue())
    (place / "saves.py").write_text(SAVES)
    return place / "saves.py"


@pytest.mark.parametrize("why", ["walltime", "preempted"])
def test_a_save_of_80_percent_of_the_window_is_complete(
    cluster: Cluster, place: Path, why: str
) -> None:
    on_first = f"--nodelist={cluster.nodes[0]}"
    settings = {"time_limit": "00:02:00", "warn_s": WARN_S} if why == "walltime" else {}
    site = Site(cluster, place, partition="gpu", extra=["--exclusive", on_first], **settings)
    window_s = WARN_S if why == "walltime" else KILL_WAIT_S
    out = place / "out"
    job = site.launch(
        write_script(place), str(out), str(place / "data"), str(0.8 * window_s),
        nproc=1, cold=True, checkpoint={"own": [f"{out}/*.pt"]},
    )  # fmt: skip
    cluster.wait((place / "out-0-ready").exists, "the handler", 120)
    if why == "preempted":
        words = ["-p", "urgent", on_first, "--exclusive", "-o", "/dev/null", "--wrap", "true"]
        urgent = cluster.call("sbatch", "--parsable", *words).strip()
        site.wait_state(urgent, "COMPLETED")
    site.wait_back(job, 1, 240)
    saved = examine(str(out / "step-1-rank0.pt"))
    assert saved.state == "whole", (saved, site.runs())
    (run,) = site.runs()
    assert (run["state"], run["warned"]) == ("stopped", why == "walltime"), run
    site.wait_state(job, "COMPLETED", 180)
