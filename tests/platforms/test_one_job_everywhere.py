"""One job file, unchanged, on every platform: interrupted twice on each, and the same to the bit.

Each platform interrupts it in its own way. Afterwards the results come home, are verified, and only
then is the place given back.
"""

import contextlib
import os
import signal
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import psutil
import pytest

from tests.e2e.box import EXAMPLE, MISSING, Box, read_json
from tests.platforms import kaggle_service, notebook_service
from tests.platforms.k8s.cluster import Kubernetes
from tests.platforms.k8s.tenant import Tenant
from tests.platforms.losses import check_equal, read_losses
from tests.platforms.person import Person
from tests.platforms.slurm_cluster import Cluster
from tests.waiting import wait_until

pytestmark = [pytest.mark.serial, pytest.mark.timeout(1800)]
STEPS = 400
INTERRUPTIONS = (70, 220)
"""At these steps, each some way beyond a checkpoint."""


class Place(Protocol):
    """A platform with a person on it."""

    person: Person

    def find_journals(self) -> Path:
        """Return the folder below which the job's journals are while it runs."""

    def interrupt(self) -> None:
        """Interrupt the job as this platform does, and have it go on."""

    def end(self) -> None:
        """Leave nothing behind."""


def find_processes(name: str, value: str, *words: str) -> list[psutil.Process]:
    """Return what lives with `name=value` in its environment, and `words` in its command line."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            mine = process.environ().get(name) == value and {*words} <= {*process.cmdline()}
            if mine and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


class Local:
    """This machine, which loses its power."""

    def __init__(self, folder: Path) -> None:
        self.person = Person(folder, 'base = "local"\n')

    def find_journals(self) -> Path:
        return self.person.home / "jobs" / "gpt"

    def interrupt(self) -> None:
        self.end()
        self.person.launch()

    def end(self) -> None:
        while processes := find_processes("PERDURE_HOME", str(self.person.home)):
            for process in processes:
                process.kill()
            psutil.wait_procs(processes, timeout=10)


class Ssh:
    """A box behind sshd, which is rebooted."""

    def __init__(self, folder: Path) -> None:
        self.box = Box(folder / "box")
        self.box.start(boot_id=str(uuid.uuid4()))
        stopped = folder / "given-back"
        self.person = Person(
            folder / "person",
            'base = "generic-ssh"\n[launch]\nhost = "gpu-box"\n'
            f'ssh_config = "{self.box.folder}/ssh_config"\nnative = false\n'
            f'python = "{sys.executable}"\n'
            f'[teardown]\nstop_command = ["touch", "{stopped}"]\n'
            f'gone_command = ["test", "-e", "{stopped}"]\n',
        )

    def find_journals(self) -> Path:
        return self.box.home / "perdure" / "state" / "jobs" / "gpt"

    def interrupt(self) -> None:
        self.box.reboot()
        self.person.launch()

    def end(self) -> None:
        self.box.power_off()


class Slurm:
    """A cluster, whose job is warned of its walltime, and the next time put back by the site."""

    def __init__(self, folder: Path, cluster: Cluster) -> None:
        self.cluster, self.durable = cluster, folder / "durable"
        self.warned = False
        self.person = Person(
            folder / "person",
            'base = "slurm"\n[slurm]\ntime_limit = "00:30:00"\nwarn_s = 60\nmem = "1500M"\n'
            f'[overrides]\nDATA_DIR = "{self.durable}"\nDURABLE_DIR = "{self.durable}"\n',
            **cluster.env,
        )

    def find_journals(self) -> Path:
        return self.durable / "state" / "jobs" / "gpt"

    def interrupt(self) -> None:
        job = str(read_json(self.person.home / "launches" / "gpt.json")["id"])
        restarts = int(self.cluster.job(job)["Restarts"])
        if self.warned:
            self.cluster.call("scontrol", "requeue", job)
        else:
            self.cluster.call("scancel", "--signal=USR1", "--batch", job)
        self.warned = True
        self.cluster.wait(
            lambda: (found := self.cluster.job(job))["Restarts"] == str(restarts + 1)
            and found["JobState"] == "PENDING",
            "the job put back", 120,
        )  # fmt: skip
        self.cluster.start_now(job)

    def end(self) -> None:
        self.cluster.end_jobs()


class Pods:
    """A cluster of Kubernetes, where the job's pod is deleted, and another one comes."""

    def __init__(self, folder: Path, cluster: Kubernetes) -> None:
        self.tenant = Tenant(cluster, folder / "tenant")
        profile = (self.tenant.home / "profiles" / "cluster.toml").read_text()
        self.person = Person(folder / "person", profile, **cluster.env)

    def find_journals(self) -> Path:
        return self.tenant.durable / "state" / "jobs" / "gpt"

    def interrupt(self) -> None:
        pod = self.tenant.find_running("gpt")
        self.tenant.cluster.kubectl("delete", "pod", pod, "--wait=true")

    def end(self) -> None:
        self.tenant.cluster.clear()


class Notebook:
    """Kaggle, whose sessions end at their ceiling: its clock is set off here."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "kaggle"
        path = f"{kaggle_service.make_program(self.root)}:{os.environ['PATH']}"
        self.person = Person(
            folder / "person",
            'base = "kaggle"\n[notebook]\nowner = "ada"\naccelerator = ""\n'
            f'internet_url = "{(folder / "person" / "gpt" / "job.toml").as_uri()}"\n',
            PATH=path,
        )

    def find_newest(self) -> Path:
        return kaggle_service.list_versions(self.root)[-1]

    def find_journals(self) -> Path:
        return self.find_newest() / "machine" / "kaggle" / "temp" / "state" / "jobs" / "gpt"

    def interrupt(self) -> None:
        version = self.find_newest()
        words = ("-m", "perdure.launch.notebook.runner")
        (program,) = find_processes("MACHINE", str(version / "machine"), *words)
        program.send_signal(signal.SIGALRM)
        wait_until((version / "code").exists, "end of the session", 120)
        self.person.launch()

    def end(self) -> None:
        for version in kaggle_service.list_versions(self.root):
            for process in find_processes("MACHINE", str(version / "machine")):
                process.kill()


@pytest.fixture(params=["local", "ssh", "slurm", "kubernetes", "notebook"])
def platform(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    """Yield each platform that can be started here."""
    made: Place
    match request.param:
        case "local":
            made = Local(tmp_path)
        case "ssh":
            if MISSING or os.system("unshare -m true 2>/dev/null"):
                pytest.skip(f"no box: {MISSING or 'no mount namespaces'}")
            made = Ssh(tmp_path)
        case "slurm":
            cluster = request.getfixturevalue("cluster")
            made = Slurm(request.getfixturevalue("place"), cluster)
        case "kubernetes":
            made = Pods(tmp_path, request.getfixturevalue("kubernetes"))
        case _:
            if lack := notebook_service.find_lack():
                pytest.skip(lack)
            made = Notebook(tmp_path)
    try:
        yield made
    finally:
        made.end()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of the same job, trained here and not interrupted."""
    person = Person(tmp_path_factory.mktemp("undisturbed"), "")
    person.perdure("run", "-c", "job.toml", cwd=person.folder / "gpt")
    return person.home / "jobs" / "gpt"


def test_one_job_file_trains_the_same_everywhere(platform: Place, undisturbed: Path) -> None:
    person = platform.person
    person.launch()
    for step in INTERRUPTIONS:
        wait_until(
            lambda step=step: max(read_losses(platform.find_journals()), default=0) >= step,
            f"step {step}", 480,
        )  # fmt: skip
        platform.interrupt()
    person.perdure("attach", "gpt", timeout_s=600)
    assert (person.folder / "gpt" / "job.toml").read_bytes() == (EXAMPLE / "job.toml").read_bytes()

    refused = person.perdure("teardown", "gpt", "--confirm", "gpt", code=4).stderr
    assert "nothing was pulled" in refused
    person.perdure("pull", "gpt", "pulled")
    refused = person.perdure("teardown", "gpt", "--confirm", "gpt", code=4).stderr
    assert "was not verified" in refused
    person.perdure("verify", "pulled")
    assert "was not typed" in person.perdure("teardown", "gpt", code=4).stderr
    person.perdure("teardown", "gpt", "--confirm", "gpt", "--others-agree")

    pulled = person.folder / "pulled"
    assert len(list(pulled.rglob("journal.jsonl"))) == 1 + len(INTERRUPTIONS)
    steps = check_equal(pulled, pulled / "job" / "checkpoints", undisturbed, STEPS)
    assert steps == set(range(STEPS))
