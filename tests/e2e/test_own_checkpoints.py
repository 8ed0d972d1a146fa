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
from tests.e2e.own_kills import (
    DECLARED,
    kill_again_and_again,
    read_lives,
    run_saver,
    wait_saves,
)

pytestmark = [pytest.mark.torch, pytest.mark.slow]

KILLS = 5
SHORT = ("trainer",)
"""A file, a folder, and shards; each format, cut at every place: tests/unit/test_own.py."""


@pytest.mark.parametrize(
    "form",
    [pytest.param(f, marks=() if f in SHORT else pytest.mark.long) for f in DECLARED],
)
def test_killed_in_the_midst_of_saves(start: Start, tmp_path: Path, form: str) -> None:
    account = kill_again_and_again(start, tmp_path, form, KILLS, random.Random(form))
    assert not account.faults, account.faults
    assert account.kills == KILLS


def test_a_torn_newest_one_is_moved_and_said(start: Start, tmp_path: Path) -> None:
    job = run_saver(start, tmp_path, "trainer", (DECLARED["trainer"],))
    wait_saves(job, tmp_path, 0, 3)
    newest = tmp_path / "out" / "checkpoint-9999"
    newest.mkdir()
    (newest / "model.safetensors").write_bytes(b"\x40\0\0\0\0\0\0\0{")
    job.kill("perdure rank")
    wait_saves(job, tmp_path, 1, 1)
    assert (tmp_path / "out.torn" / "checkpoint-9999" / "model.safetensors").exists()
    assert not newest.exists()
    words = "out/checkpoint-9999 (model.safetensors: a header of 64 bytes in a file of 9)"
    job.wait_until(lambda: words in job.text().replace("\n", " "), "its name in the output")
    for text in (job.text(), job.cli("status", "own").stdout, job.cli("report", "own").stdout):
        assert words in text.replace("\n", " "), text
        assert "moved to out.torn/checkpoint-9999; the newest whole one is out/checkpoint-" in text
    names = [json.loads(line)["kind"] for line in
             job.cli("events", "own", "--json").stdout.splitlines()]  # fmt: skip
    assert names.index("TornFound") < names.index("OwnChecked", names.index("TornFound"))
    (tmp_path / "enough").touch()
    assert job.wait() == 0, job.text()


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


def test_commands_name_the_newest_whole_one(start: Start, tmp_path: Path) -> None:
    job = run_saver(start, tmp_path, "dcp", (DECLARED["dcp"],))
    wait_saves(job, tmp_path, 0, 3)
    (tmp_path / "enough").touch()
    assert job.wait() == 0, job.text()
    step = read_lives(tmp_path)[0][-1][1]
    for command in ("status", "report"):
        text = job.cli(command, "own").stdout
        assert f"the newest whole one is out/step-{step} (step {step}, " in text, text
    job.cli("report", "own", "--html", "r.html")
    page = (tmp_path / "r.html").read_text()
    assert f"the newest whole one is out/step-{step} (step {step}, " in page
    picture = JobReading(find_here("own", str(tmp_path / "state"))).look()
    assert f"the newest whole one is out/step-{step} " in picture.own
    assert picture.own in render_section("checkpoints", picture, live=True)
    own = json.loads(job.cli("status", "own", "--json").stdout)["own"]
    assert (own["step"], own["format"]) == (step, "torch.distributed.checkpoint")
    told = job.cli("verify", "own", "--full").stdout
    assert f"step {step}: ok" in told, told
    piece = tmp_path / "out" / f"step-{step}" / "__0_0.distcp"
    piece.write_bytes(piece.read_bytes()[:-10])
    torn = job.cli("verify", "own", check=False)
    assert torn.returncode == 3, torn.stdout
    assert f"step {step}: DAMAGED: __0_0.distcp has" in torn.stdout, torn.stdout


def test_verify_of_a_job_without_any(start: Start, tmp_path: Path) -> None:
    job = run_saver(start, tmp_path, "torch", ())
    wait_saves(job, tmp_path, 0, 1)
    (tmp_path / "enough").touch()
    assert job.wait() == 0, job.text()
    told = job.cli("verify", "own", check=False)
    assert told.returncode == 2, told.stderr
    assert "no checkpoints: perdure has saved none, and the job declares none" in told.stderr
    assert "hint: checkpoint.own" in told.stderr


@pytest.mark.parametrize("form", [pytest.param("trainer", marks=pytest.mark.long), "deepspeed"])
def test_a_machine_without_a_checkpoint_fetches_the_newest_copy(
    start: Start, tmp_path: Path, form: str
) -> None:
    away = tmp_path / "away"
    job = run_saver(start, tmp_path, form, (DECLARED[form],), f'url = "{away}"')
    wait_saves(job, tmp_path, 0, 3)
    (tmp_path / "enough").touch()
    assert job.wait() == 0, job.text()
    step = read_lives(tmp_path)[0][-1][1]
    shutil.rmtree(tmp_path / "out")
    (tmp_path / "enough").unlink()
    again = start("own", "-c", "job.toml")
    wait_saves(again, tmp_path, 1, 1)
    assert read_lives(tmp_path)[1][0] == ("began", step)
    (tmp_path / "enough").touch()
    assert again.wait() == 0, again.text()
    for text in (again.text(), again.cli("report", "own").stdout):
        told = " ".join(text.split())
        assert "This machine had no checkpoint of the script: out/" in told, text
        assert "is fetched from" in told, text


def test_storage_that_hangs_costs_training_nothing(start: Start, tmp_path: Path) -> None:
    away = tmp_path / "away"
    form = "torch"
    job = run_saver(start, tmp_path, form, (DECLARED[form],), f'url = "{away}"')
    latest = away / "own-own" / quote(DECLARED[form], safe="") / "latest"
    job.wait_until(latest.exists, "a copy")
    (tmp_path / "enough").touch()
    assert job.wait() == 0, job.text()
    latest.unlink()
    os.mkfifo(latest)  # A read of it never returns.
    (tmp_path / "enough").unlink()
    again = start("own", "-c", "job.toml")
    for life in (1, 2):
        wait_saves(again, tmp_path, life, 3)
        if life == 1:
            again.kill("perdure rank")
    (tmp_path / "enough").touch()
    assert again.wait() == 0, again.text()
