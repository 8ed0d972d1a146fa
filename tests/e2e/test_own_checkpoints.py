"""A script with own saves is killed in the midst of them; it goes on from the newest whole one."""

import json
import os
import random
import shutil
import subprocess
from pathlib import Path
from urllib.parse import quote

import pytest

from perdure.cli.jobs import find_here
from perdure.cli.page.reading import JobReading
from perdure.dash.sections import render_section
from tests.e2e.exact import Start
from tests.e2e.harness import Job
from tests.e2e.own_kills import (
    DECLARED,
    kill_again_and_again,
    read_lives,
    run_saver,
    wait_saves,
)

pytestmark = [pytest.mark.torch, pytest.mark.slow]

KILLS = 5


@pytest.mark.long
@pytest.mark.parametrize("form", [form for form in DECLARED if form != "trainer"])
def test_killed_in_the_midst_of_saves(start: Start, tmp_path: Path, form: str) -> None:
    """Each format, cut at every place: tests/unit/test_own.py."""
    account = kill_again_and_again(start, tmp_path, form, KILLS, random.Random(form))
    assert not account.faults, account.faults
    assert account.kills == KILLS


def test_killed_in_the_midst_of_saves_and_a_torn_newest_one_is_moved_and_said(
    start: Start, tmp_path: Path
) -> None:
    """Its saves are a file, a folder, and shards."""

    def tear_newest(job: Job) -> None:
        newest = tmp_path / "out" / "checkpoint-9999"
        newest.mkdir()
        (newest / "model.safetensors").write_bytes(b"\x40\0\0\0\0\0\0\0{")
        life = len(read_lives(tmp_path))
        job.kill(f"perdure rank own g{life - 1} r0")
        wait_saves(job, tmp_path, life, 1)
        assert (tmp_path / "out.torn" / "checkpoint-9999" / "model.safetensors").exists()
        assert not newest.exists()
        check_told(job)

    account = kill_again_and_again(
        start, tmp_path, "trainer", KILLS, random.Random("trainer"), kill_last=tear_newest
    )
    assert not account.faults, account.faults
    assert account.kills == KILLS


def check_told(job: Job) -> None:
    """See that the torn one is named, and where it was moved."""
    words = "out/checkpoint-9999 (model.safetensors: a header of 64 bytes in a file of 9)"
    job.wait_until(lambda: words in job.text().replace("\n", " "), "its name in the output")
    for text in (job.text(), job.cli("status", "own").stdout, job.cli("report", "own").stdout):
        assert words in text.replace("\n", " "), text
        assert "moved to out.torn/checkpoint-9999; the newest whole one is out/checkpoint-" in text
    names = [json.loads(line)["kind"] for line in
             job.cli("events", "own", "--json").stdout.splitlines()]  # fmt: skip
    assert names.index("TornFound") < names.index("OwnChecked", names.index("TornFound"))


@pytest.mark.long
def test_what_is_not_understood_is_not_moved(start: Start, tmp_path: Path) -> None:
    job = run_saver(start, tmp_path, "torch", ("out/*",))
    wait_saves(job, tmp_path, 0, 2)
    strange = tmp_path / "out" / "a-0.state"  # It is no name that the script goes by.
    strange.write_bytes(b"its own format, cut in the mid")
    job.kill("perdure rank")
    wait_saves(job, tmp_path, 1, 1)
    assert strange.exists()
    (tmp_path / "enough").touch()
    assert job.wait() == 0, job.text()


def test_an_undeclared_one_is_named_and_never_touched(start: Start, tmp_path: Path) -> None:
    job = run_saver(start, tmp_path, "torch", ())
    wait_saves(job, tmp_path, 0, 3)
    torn = tmp_path / "out" / "ckpt-99999.pt"
    torn.write_bytes((tmp_path / "out" / "ckpt-00001.pt").read_bytes()[:400])
    job.kill("perdure rank")
    assert job.wait() == 1, job.text()
    text = job.text()
    assert torn.stat().st_size == 400
    assert job.state()["restarts"] == 2, "one failure to load may be chance, the second is not"
    words = "out/ckpt-99999.pt (ckpt-99999.pt ends at byte 400, before its directory), cut at 20"
    newest = max(step for word, step in read_lives(tmp_path)[0] if word == "saved")
    move = "mkdir -p out.torn && mv out/ckpt-99999.pt out.torn/ckpt-99999.pt"
    for told in (text, job.cli("status", "own").stdout, job.cli("diagnose", "own").stdout):
        told = " ".join(told.split())
        assert words in told, told
        assert move in told, told
        assert 'checkpoint.own = ["out/ckpt-*.pt"]' in told, told
        assert f"newest whole one is out/ckpt-{newest:05}.pt" in told, told
        assert "disk was full" not in told, told
    subprocess.run(["sh", "-c", move], cwd=tmp_path, check=True)
    (tmp_path / "out" / f"ckpt-{newest + 1:05}.pt").unlink(missing_ok=True)  # The kill may cut one.
    (tmp_path / "enough").touch()
    again = start("own", "-c", "job.toml")
    assert again.wait() == 0, again.text()
    assert read_lives(tmp_path)[-1][0] == ("began", newest)
    none = again.cli("verify", "own", check=False)
    assert none.returncode == 2, none.stderr
    assert "no checkpoints: perdure has saved none, and the job declares none" in none.stderr
    assert "hint: checkpoint.own" in none.stderr


def test_commands_name_the_newest_whole_one_and_a_machine_without_one_fetches_it(
    start: Start, tmp_path: Path
) -> None:
    """The copy's storage hangs at last, which costs training nothing."""
    away = tmp_path / "away"
    job = run_saver(start, tmp_path, "dcp", (DECLARED["dcp"],), f'url = "{away}"')
    wait_saves(job, tmp_path, 0, 3)
    (tmp_path / "enough").touch()
    assert job.wait() == 0, job.text()
    step = read_lives(tmp_path)[0][-1][1]
    check_commands(job, step)
    fetch(start, tmp_path, step)
    latest = away / "own-own" / quote(DECLARED["dcp"], safe="") / "latest"
    latest.unlink()
    os.mkfifo(latest)  # A read of it never returns.
    (tmp_path / "enough").unlink()
    again = start("own", "-c", "job.toml")
    for life in (2, 3):
        wait_saves(again, tmp_path, life, 3)
        if life == 2:
            again.kill("perdure rank")
    (tmp_path / "enough").touch()
    assert again.wait() == 0, again.text()


def check_commands(job: Job, step: int) -> None:
    """Each command names the newest one, which is of `step`; then damage it."""
    for command in ("status", "report"):
        text = job.cli(command, "own").stdout
        assert f"the newest whole one is out/step-{step} (step {step}, " in text, text
    job.cli("report", "own", "--html", "r.html")
    page = (job.home / "r.html").read_text()
    assert f"the newest whole one is out/step-{step} (step {step}, " in page
    picture = JobReading(find_here("own", str(job.home / "state"))).look()
    assert f"the newest whole one is out/step-{step} " in picture.own
    assert picture.own in render_section("checkpoints", picture, live=True)
    own = json.loads(job.cli("status", "own", "--json").stdout)["own"]
    assert (own["step"], own["format"]) == (step, "torch.distributed.checkpoint")
    told = job.cli("verify", "own", "--full").stdout
    assert f"step {step}: ok" in told, told
    piece = job.home / "out" / f"step-{step}" / "__0_0.distcp"
    piece.write_bytes(piece.read_bytes()[:-10])
    torn = job.cli("verify", "own", check=False)
    assert torn.returncode == 3, torn.stdout
    assert f"step {step}: DAMAGED: __0_0.distcp has" in torn.stdout, torn.stdout


def fetch(start: Start, folder: Path, step: int) -> None:
    """Lose all of the job's checkpoints; its next start begins at the copy of `step`."""
    shutil.rmtree(folder / "out")
    (folder / "enough").unlink()
    again = start("own", "-c", "job.toml")
    wait_saves(again, folder, 1, 1)
    assert read_lives(folder)[1][0] == ("began", step)
    (folder / "enough").touch()
    assert again.wait() == 0, again.text()
    for text in (again.text(), again.cli("report", "own").stdout):
        told = " ".join(text.split())
        assert "This machine had no checkpoint of the script: out/" in told, text
        assert "is fetched from" in told, text


@pytest.mark.long
@pytest.mark.parametrize("form", ["trainer", "deepspeed"])
def test_a_machine_without_a_checkpoint_fetches_the_newest_copy(
    start: Start, tmp_path: Path, form: str
) -> None:
    away = tmp_path / "away"
    job = run_saver(start, tmp_path, form, (DECLARED[form],), f'url = "{away}"')
    wait_saves(job, tmp_path, 0, 3)
    (tmp_path / "enough").touch()
    assert job.wait() == 0, job.text()
    fetch(start, tmp_path, read_lives(tmp_path)[0][-1][1])
