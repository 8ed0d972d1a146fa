"""Notebooks as they are rendered, executed by Jupyter; kernels and machines are really killed."""

import http.server
import json
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.box import read_json
from tests.e2e.harness import SCRIPTS
from tests.platforms.kaggle_service import list_versions, make_program
from tests.platforms.losses import check_equal
from tests.platforms.notebook_service import Machine, find_lack, find_text
from tests.platforms.person import Person
from tests.waiting import wait_until

pytestmark = [pytest.mark.serial, pytest.mark.timeout(900)]
STEPS = 400
PACED_STEPS = 700
PACED = f"""\
name = "paced"
script = "train_exact.py"
args = ["--trail", ".", "--steps", "{PACED_STEPS}", "--pace-s", "0.1"]
nproc = 2
[checkpoint]
every_steps = 50
[launch]
outputs = ["rank-0.jsonl"]
"""


@pytest.fixture(autouse=True)
def possible() -> None:
    if lack := find_lack():
        pytest.skip(lack)


class Somebody(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(204)
        self.end_headers()

    def log_message(self, *words: object) -> None:
        pass


@pytest.fixture
def internet() -> Iterator[str]:
    """Yield the address of somebody who answers."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Somebody) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()
        thread.join()


def make_profile(service: str, internet: str, **section: Any) -> str:
    """Return a profile for a machine of `service` without a GPU."""
    section = {"accelerator": "", "internet_url": internet, **section}
    lines = [f"{key} = {json.dumps(value)}" for key, value in section.items()]
    return "\n".join([f'base = "{service}"', "[notebook]", *lines]) + "\n"


def render(person: Person) -> Path:
    person.perdure("launch", "gpt/job.toml", "--on", "mine", "--dry-run", "--out", "rendered")
    return person.folder / "rendered" / "gpt.ipynb"


def train_reference(person: Person, job: Path) -> Path:
    """Train a job here, undisturbed; return its directory."""
    person.perdure("run", "-c", job.name, "--name", "undisturbed", cwd=job.parent)
    return person.home / "jobs" / "undisturbed"


@pytest.fixture
def make_machine(tmp_path: Path) -> Iterator[Callable[..., Machine]]:
    """Yield a function that makes a machine of Colab; all have one Drive."""
    drive = tmp_path / "drive"
    drive.mkdir()
    machines: list[Machine] = []

    def make(**options: Any) -> Machine:
        root = tmp_path / f"machine-{len(machines)}"
        machines.append(Machine(root, "/content", DRIVE=str(drive), **options))
        return machines[-1]

    try:
        yield make
    finally:
        for machine in machines:
            if machine.process.poll() is None:
                machine.vanish()


def find_step(machine: Machine) -> int:
    return int(read_json(machine.place / "state" / "jobs" / "gpt" / "state.json").get("step", -1))


def find_checkpoints(durable: Path) -> list[int]:
    names = durable.glob("checkpoints/step-*/manifest.json")
    return sorted(int(path.parent.name.removeprefix("step-")) for path in names)


def test_a_killed_kernel_and_a_lost_machine_change_no_loss(
    tmp_path: Path, internet: str, make_machine: Callable[..., Machine]
) -> None:
    person = Person(tmp_path / "person", make_profile("colab", internet))
    notebook = render(person)
    durable = tmp_path / "drive" / "MyDrive" / "perdure" / "gpt"

    first = make_machine()
    code = first.execute(notebook)
    first.wait_until(lambda: find_step(first) >= 60, code, "step 60")
    (kernel,) = first.find("ipykernel_launcher")
    kernel.kill()
    assert first.wait(code) != 0
    # Run all, at once: the job of before still saves, and is waited for.
    code = first.execute(notebook)
    first.wait_until(lambda: max(find_checkpoints(durable), default=0) >= 150, code, "step 150")
    first.vanish()
    newest = max(find_checkpoints(durable))
    assert read_json(durable / "status.json")["state"] == "stopped"  # By the first kernel's end.

    second = make_machine()
    assert second.wait(second.execute(notebook)) == 0
    text = find_text(second.root / "out-1.ipynb")
    assert f"the newest is step-{newest:08d}" in text
    assert "Drive, mounted anew, has" in text
    assert read_json(durable / "status.json")["state"] == "done"
    # Of the machine that was lost, the journal is as old as it was last kept.
    reference = train_reference(person, person.folder / "gpt" / "job.toml")
    steps = check_equal(durable, durable / "checkpoints", reference, STEPS)
    assert set(range(60)) | set(range(newest, STEPS)) <= steps


def test_what_a_session_lacks_is_said_in_one_line(
    tmp_path: Path, internet: str, make_machine: Callable[..., Machine]
) -> None:
    person = Person(tmp_path / "person", make_profile("colab", internet))
    notebook = render(person)
    forgetful = make_machine(LOSES=".probe-*")
    assert forgetful.wait(forgetful.execute(notebook)) != 0
    text = find_text(forgetful.root / "out-1.ipynb")
    assert "refused: durable place: /content/drive/MyDrive/perdure/gpt: what was written" in text
    assert "training" not in text

    lonely = make_machine(internet=False)
    assert lonely.wait(lonely.execute(notebook)) != 0
    text = find_text(lonely.root / "out-1.ipynb")
    assert f"perdure: refused: internet: {internet} is not reached" in text

    person.profile.write_text(make_profile("colab", internet, accelerator="T4"))
    assert lonely.wait(lonely.execute(render(person))) != 0
    text = find_text(lonely.root / "out-2.ipynb")
    assert "perdure: refused: accelerator: torch " in text
    assert "sees no GPU" in text


def test_versions_of_kaggle_leave_before_their_limit_and_go_on(
    tmp_path: Path, internet: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = tmp_path / "kaggle"
    monkeypatch.setenv("PATH", str(make_program(service)), prepend=":")
    profile = make_profile("kaggle", internet, owner="ada", stop_before_s=90, startup_s=10)
    person = Person(tmp_path / "person", f"{profile}[interruption]\nsession_max_s = 150\n")
    (person.folder / "paced").mkdir()
    shutil.copy(SCRIPTS / "train_exact.py", person.folder / "paced")
    (person.folder / "paced" / "job.toml").write_text(PACED)

    person.launch("paced/job.toml")
    told = person.perdure("launch", "paced/job.toml", "--on", "mine", code=2).stderr
    assert "a session of ada/perdure-paced is running" in told
    assert "is running" in person.perdure("pull", "paced", "pulled", code=4).stderr
    (first,) = list_versions(service)
    wait_until((first / "code").exists, "end before the limit", 170)
    status = person.perdure("status", "paced").stderr
    assert "session 1: stopped: left before the session's end" in status
    while "goes on from step" in status:  # A busy machine needs more than two.
        assert len(list_versions(service)) < 9, status
        person.launch("paced/job.toml")
        person.perdure("attach", "paced")
        status = person.perdure("status", "paced").stderr
    assert ": done" in status

    assert "nothing was pulled" in person.perdure("teardown", "paced", code=4).stderr
    person.perdure("pull", "paced", "pulled")
    person.perdure("verify", "pulled")
    assert "was not typed" in person.perdure("teardown", "paced", code=4).stderr
    person.perdure("teardown", "paced", "--confirm", "paced")
    pulled = person.folder / "pulled" / "job"
    assert all((session / "outputs" / "rank-0.jsonl").exists() for session in pulled.glob("sess*"))
    reference = train_reference(person, person.folder / "paced" / "job.toml")
    steps = check_equal(pulled, pulled / "checkpoints", reference, PACED_STEPS)
    assert steps == set(range(PACED_STEPS))
