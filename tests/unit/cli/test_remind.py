"""P7: price is acted upon: what costs and is looked after by nobody is said, and told to alerts."""

import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from tests.gate_site import Site, make_site

from perdure.cli.platforms import remote
from perdure.launch.records import write_record
from perdure.model.job import AlertsConfig
from perdure.service.controller import alerts


@pytest.fixture
def site(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Site:
    made = make_site(tmp_path, monkeypatch, capsys)
    teardown = msgspec.structs.replace(
        made.record.profile.teardown, price_per_hour=2.0, budget=100.0
    )
    made.set_profile(teardown=teardown)
    return made


def change(site: Site, **changes: Any) -> None:
    write_record(str(site.home), msgspec.structs.replace(site.read_record(), **changes))


def test_a_job_that_has_ended_is_called_to_mind_until_it_is_torn_down(site: Site) -> None:
    change(site, launched_s=time.time() - 3600, home=str(site.box / "state"))
    ended = site.job / "launch" / "exit.json"
    told = json.loads(ended.read_text())
    ended.write_text(json.dumps(told | {"at": time.time() - 1800}))
    said = site.run("status", "--remind")
    assert "gpt: it has ended 0.5 h ago, and generic-ssh is billed on, 2 USD an hour" in said
    assert "it has ended" in site.run("status"), "it tells what was seen"
    (row,) = json.loads(site.run("status", "--json"))["launched"]
    assert [reminder["kind"] for reminder in row["reminders"]] == ["ended"]
    change(site, torn_down_s=time.time())
    assert "nothing to look after" in site.run("status", "--remind")


def test_a_budget_is_watched_from_the_first_launch_on(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.time()
    monkeypatch.setattr(remote, "time", SimpleNamespace(**vars(time) | {"time": lambda: now}))
    change(site, launched_s=now - 60, billed_since_s=now - 45 * 3600)
    assert "90.00 of its budget of 100.00 USD are spent; the rest lasts 5.0 h" in site.run("status")
    change(site, billed_since_s=now - 60 * 3600)
    assert "its budget of 100.00 USD is spent: 120.00 in 60.0 h; nothing is stopped" in (
        site.run("status")
    )
    teardown = msgspec.structs.replace(site.record.profile.teardown, price_per_hour=0.0)
    site.set_profile(teardown=teardown)
    assert "the profile has no price" in site.run("status")


def test_a_machine_that_does_nothing_while_its_job_runs_is_called_to_mind(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = site.job / "launch" / "box.py"
    told = {"state": "running", "reason": "it lives", "load": 0.02}
    program.write_text(f"print('@@perdure-json ' + {json.dumps(json.dumps(told))})\n")
    change(site, launched_s=time.time())
    assert "has done nothing for a quarter of an hour (load 0.02)" in site.run("status", "--remind")
    program.write_text(program.read_text().replace("0.02", "3.5"))
    assert "nothing to look after" in site.run("status", "--remind")


def test_a_stop_that_nobody_has_confirmed_is_called_to_mind(site: Site) -> None:
    change(site, launched_s=time.time(), stop_asked_s=time.time() - 7200)
    assert "stop was asked for 2.0 h ago" in site.run("status")


def test_reminders_go_to_the_jobs_alerts_once_a_day(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(alerts, "ATTEMPTS", 1)
    heard = site.folder / "heard"
    told = AlertsConfig(command=("sh", "-c", f"cat >> {heard}"))
    change(site, launched_s=time.time() - 3600, alerts=told)
    site.run("status", "--remind")
    site.run("status", "--remind")
    (line,) = heard.read_text().splitlines()
    alert = json.loads(line)
    assert (alert["job"], alert["kind"]) == ("gpt", "meter")
    assert "it has ended" in alert["summary"]

    (site.home / "launches" / "seen" / "gpt.reminded.json").unlink()
    change(site, alerts=AlertsConfig(command=("false",)))
    assert "was not delivered" in site.run("status", "--remind", code=3)
    change(site, alerts=AlertsConfig(command=("sh", "-c", f"cat >> {heard}"), events=("ended",)))
    site.run("status", "--remind")
    assert len(heard.read_text().splitlines()) == 1
