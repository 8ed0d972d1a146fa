"""A laptop's profile of the tests' cluster, behind a box that is its login node."""

import sys

from tests.e2e.box import Laptop
from tests.platforms.slurm_cluster import Cluster

_PROFILE = """\
base = "slurm"
[launch]
host = "gpu-box"
ssh_config = "{box}/ssh_config"
python = "{python}"
environment = "auto"
connect_timeout_s = 5
native = false
[slurm]
time_limit = "00:10:00"
warn_s = 70
startup_s = 10
checkpoint_s = 5
mem = "1500M"
[overrides]
DATA_DIR = "$HOME/perdure"
DURABLE_DIR = "$HOME/perdure"
PROXY_HOOK = "export SLURM_CONF={conf}"
"""


def add_profile(laptop: Laptop, cluster: Cluster) -> None:
    """Give the laptop the profile `cluster`; only its box has Slurm."""
    text = _PROFILE.format(
        box=laptop.box.folder, python=sys.executable, conf=cluster.env["SLURM_CONF"]
    )
    (laptop.home / "profiles" / "cluster.toml").write_text(text)
    laptop.env |= {"SLURM_CONF": "/nowhere"}
