"""`perdure drill --on`: a copy of a job is harmed on boxes, and nothing of it is left there."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from perdure.adapters.confinement import can_confine
from tests.e2e.box import Box, Laptop, make_boxes, needs_sshd
from tests.e2e.test_drill import TRAIN
from tests.lab.network import Lab, why_not
from tests.platforms.test_boxes import Boxes
from tests.waiting import wait_until

pytestmark = [
    pytest.mark.serial,
    needs_sshd,
    pytest.mark.timeout(590),
    pytest.mark.skipif(not can_confine(), reason="this kernel has no Landlock"),
]
several = pytest.mark.skipif(bool(why_not()), reason=f"no network namespaces: {why_not()}")


def write_job(laptop: Laptop, script: str = TRAIN, steps: int = 20_000, **job: Any) -> None:
    """Write the project, and the job file beside it."""
    project = laptop.folder / "project"
    project.mkdir(exist_ok=True)
    (project / "train.py").write_text(script.replace("STEPS", str(steps)))
    document = {"name": "mine", "script": "train.py", "launch": {"project": "project"}} | job
    (laptop.folder / "job.json").write_text(json.dumps(document))


def start(laptop: Laptop, *options: str) -> "subprocess.Popen[str]":
    return laptop.start("drill", "job.json", "--on", "box", "--json", *options)


def run(laptop: Laptop, *options: str) -> tuple[int, dict[str, Any]]:
    """Return the exit code and the card, or the error."""
    with start(laptop, *options) as process:
        out, err = process.communicate(timeout=560)
    assert out, err
    card: dict[str, Any] = json.loads(out.splitlines()[-1])
    card["by"] = {row["fault"]: row for row in card.get("rows", ())}
    return process.returncode, card


def list_left(box: Box) -> list[str]:
    """Return what a box still has of a drill: processes, and folders below its home."""
    listens = "python3 - listen"  # The launch's own, by which boxes find one another: for a minute.
    found = []
    for process in box.find_processes():
        with contextlib.suppress(psutil.Error):  # It has just ended.
            text = " ".join(process.cmdline())
            if text and not text.startswith(listens):
                found.append(text)
    below = (
        os.path.join(top, name)
        for top, folders, files in os.walk(box.home)
        for name in (*folders, *files)
    )
    return found + [path for path in below if "-drill-" in os.path.basename(path)]


def check_nothing_left(*boxes: Box, timeout_s: float = 20.0) -> None:
    wait_until(
        lambda: not any(list_left(box) for box in boxes),
        f"end of {[list_left(box) for box in boxes]}",
        timeout_s,
    )


@pytest.fixture
def box(tmp_path: Path) -> Iterator[Callable[..., Laptop]]:
    yield from make_boxes(tmp_path)


@pytest.fixture
def shared() -> Iterator[Path]:
    """Return a disk that all boxes see, outside /tmp, which is refused as a durable place."""
    folder = Path(tempfile.mkdtemp(prefix=".perdure-platforms-", dir=Path.home()))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def boxes(tmp_path: Path, shared: Path) -> Iterator[Boxes]:
    with Lab(2) as lab:
        made = Boxes(lab, tmp_path)
        profile = made.laptop.home / "profiles" / "box.toml"
        text = profile.read_text()
        profile.write_text(f'shared_fs = true\n{text}DURABLE_DIR = "{shared}"\n')
        try:
            yield made
        finally:
            made.laptop.disconnect()
            for each in made.boxes:
                each.power_off()


@several
def test_a_job_on_two_boxes_is_harmed_and_one_of_them_is_taken(boxes: Boxes, shared: Path) -> None:
    laptop = boxes.laptop
    write_job(laptop, nodes=2, detect={"node_lost_s": 4.0})
    (shared / "precious").write_text("the user's")
    names = ("crash", "stop", "node", "torn", "controller")
    options = [word for name in names for word in ("--fault", name)]
    code, card = run(laptop, "--yes", "--budget", "6m", *options)
    assert {name: row["verdict"] for name, row in card["by"].items()} == dict.fromkeys(
        names, "passed"
    ), card
    assert code == 0
    assert card["place"] == "box1, box2"
    assert [row["losses"] for row in card["rows"]] == ["equal"] * len(names), card
    assert (card["by"]["node"]["found_as"], card["by"]["node"]["culprit_right"]) == (
        "NodeLost of node 1", True,
    )  # fmt: skip
    assert "box2" in card["by"]["node"]["what"]
    assert "cut in half" in card["by"]["torn"]["what"]
    assert card["by"]["controller"]["steps_redone"] == 0
    check_nothing_left(*boxes.boxes)
    assert [path.name for path in shared.iterdir()] == ["precious"]
    assert not list(laptop.home.glob("launches/*")), "nobody is reminded of a drill"
    assert len(list(laptop.home.glob("results/drill-*"))) == 1


def test_one_box_is_looked_at_first_and_the_script_is_held_there(
    box: Callable[..., Laptop],
) -> None:
    laptop = box()
    outside = laptop.box.folder / "of-the-user"
    outside.mkdir()
    saves = "    open(sys.argv[1] + '/last.pt', 'w').write('of a drill')\n"
    write_job(laptop, TRAIN.replace("    # more\n", saves), args=[str(outside)])
    code, told = run(laptop)
    assert (code, "not confirmed" in told["error"]) == (4, True)
    code, plan = run(laptop, "--dry-run")
    told = " ".join(plan["told"])
    assert (code, "gpu-box: its kernel lets the script write in its copy" in told) == (0, True)
    assert "not held back: what the script sends by a network" in told
    assert "alone" in plan["left_out"]["node"]
    assert not (laptop.box.home / "perdure").exists(), "nothing was sent"
    code, card = run(laptop, "--yes", "--fault", "crash", "--fault", "node", "--budget", "2m")
    assert code == 1
    assert "Permission denied" in card["reason"], card
    assert "--writable" in card["reason"]
    assert list(outside.iterdir()) == []
    check_nothing_left(laptop.box)
    code, card = run(
        laptop, "--yes", "--fault", "disk", "--fault", "bus", "--budget", "4m",
        "--writable", str(outside),
    )  # fmt: skip
    assert {name: row["verdict"] for name, row in card["by"].items()} == {
        "disk": "passed", "bus": "passed",
    }, card  # fmt: skip
    assert "No space left" in card["by"]["disk"]["found_as"]
    assert (laptop.box.home / ".cache").is_dir(), "a fresh box has none, and scripts want one"
    assert (outside / "last.pt").read_text() == "of a drill"
    check_nothing_left(laptop.box)


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_drill_that_is_ended_leaves_nothing_on_its_box(
    box: Callable[..., Laptop], number: signal.Signals
) -> None:
    """Of one that was killed nobody is left to say so: the box finds out by itself."""
    laptop = box()
    write_job(laptop)
    with start(laptop, "--yes", "--fault", "crash", "--fault", "stop", "--budget", "4m") as process:
        assert process.stderr is not None
        assert any("drill: crash: passed" in line for line in process.stderr)
        process.send_signal(number)
        process.communicate(timeout=90)
    assert process.returncode == (130 if number == signal.SIGINT else -number)
    check_nothing_left(laptop.box, timeout_s=20.0 if number == signal.SIGINT else 90.0)


@pytest.mark.long
@pytest.mark.parametrize("sent", ["project", "launch/run.sh"])
def test_a_drill_that_is_killed_while_it_sends_leaves_nothing(
    box: Callable[..., Laptop], sent: str
) -> None:
    """There is no environment yet, and nothing was started that could find out."""
    laptop = box()
    write_job(laptop)
    with start(laptop, "--yes", "--fault", "crash", "--budget", "2m") as process:
        wait_until(lambda: list(laptop.box.home.glob(f"perdure/*-drill-*/{sent}")), sent, 60.0)
        process.kill()
        process.communicate(timeout=60)
    check_nothing_left(laptop.box, timeout_s=130.0)


@pytest.mark.long
def test_a_script_that_deletes_its_own_folder_leaves_nothing(box: Callable[..., Laptop]) -> None:
    """That is the one thing which it may delete, and with it what tells who runs it."""
    laptop = box()
    precious = laptop.box.home / "perdure" / "mine" / "last.pt"
    precious.parent.mkdir(parents=True)
    precious.write_text("the user's")
    script = (
        "import glob, os, shutil, signal, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "for each in glob.glob(os.environ['HOME'] + '/perdure/mine*'):\n"
        "    shutil.rmtree(each, ignore_errors=True)\n"
        "time.sleep(600)\n"
    )
    write_job(laptop, script)
    code, _ = run(laptop, "--yes", "--fault", "crash", "--budget", "2m")
    assert code
    check_nothing_left(laptop.box)
    assert precious.read_text() == "the user's"


@pytest.mark.long
def test_a_script_without_steps_that_knows_no_checkpoint_fails_there_too(
    box: Callable[..., Laptop],
) -> None:
    laptop = box()
    script = (
        "import time\nfor step in range(100_000):\n"
        "    print(f'step {step} loss {1 / (step + 1):.4f}', flush=True)\n    time.sleep(0.05)\n"
    )
    write_job(laptop, script)
    code, card = run(laptop, "--yes", "--fault", "crash", "--fault", "torn", "--budget", "2m")
    row = card["by"]["crash"]
    assert (row["verdict"], row["culprit_right"], code) == ("failed", True, 1), card
    assert "began again from its start" in row["why"]
    assert "declares no steps" in card["by"]["torn"]["why"]
    check_nothing_left(laptop.box)


def test_platforms_of_another_kind_and_no_box_are_refused(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print()\n")
    (tmp_path / "job.json").write_text(json.dumps({"script": "train.py"}))
    for options, what in (
        (("--on", "slurm"), "platforms of kind slurm are not drilled"),
        (("--on", "kubernetes"), "platforms of kind kubernetes are not drilled"),
        (("--on", "generic-ssh"), "no box is named"),
        (("--on", "generic-ssh", "--host", "a", "--writable", "here"), "not absolute"),
        (("--on", "local", "--host", "a"), "no box is meant"),
    ):
        words = ["perdure", "drill", "job.json", "--json", *options]
        done = subprocess.run(
            [sys.executable, "-m", *words],
            cwd=tmp_path, env=dict(os.environ, PERDURE_HOME=str(tmp_path / "home")), text=True,
            capture_output=True, timeout=60, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        assert (done.returncode, what in json.loads(done.stdout)["error"]) == (2, True), done
