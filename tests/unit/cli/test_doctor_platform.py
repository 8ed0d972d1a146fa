"""`perdure doctor --on PROFILE`: what could be checked of a platform from here."""

import json
from pathlib import Path
from typing import Any

import pytest
from tests.played_cloud import Cloud

from perdure.cli.app import run_command

Doctor = Any


@pytest.fixture
def ask(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Doctor:
    """Return what asks the doctor of a profile that is made of these lines."""
    (tmp_path / "profiles").mkdir()
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PERDURE_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=":")

    def ask_doctor(text: str) -> dict[str, dict[str, str]]:
        (tmp_path / "profiles" / "mine.toml").write_text(text)
        capsys.readouterr()
        assert run_command(["doctor", "--on", "mine", "--json"]) in (0, 3)
        checks = json.loads(capsys.readouterr().out)["checks"]
        return {check["name"]: check for check in checks}

    return ask_doctor


@pytest.fixture
def cloud(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ask: Doctor) -> Cloud:
    played = Cloud(tmp_path, "aws-spot")
    monkeypatch.setenv("PLAYED_CLOUD", str(played.state))
    return played


def test_a_machine_that_the_cloud_knows_is_asked_for_and_not_stopped(
    ask: Doctor, cloud: Cloud
) -> None:
    found = ask('base = "aws-spot"\n[teardown]\nid = "box-1"\n')
    assert (found["meter"]["state"], found["meter"]["evidence"]) == (
        "ok", "box-1 is known: running",
    )  # fmt: skip
    assert not cloud.ask("stopped")
    assert [words[2] for words in cloud.ask("asked")] == ["describe-instances"]


@pytest.mark.parametrize(
    ("profile", "facts", "evidence"),
    [
        ('[teardown]\nid = "box-2"\n', {}, "does not exist"),
        ('[teardown]\nid = "box-1"\n', {"set_up": False}, "You must specify a region"),
        ("", {}, "no teardown.id"),
        ('[teardown]\nid = "box-1"\ngone_command = []\n', {}, "nobody says whether it is"),
        ("[teardown]\nstop_command = []\n", {}, "stopped by hand: cancel a persistent"),
    ],
)
def test_a_meter_that_cannot_be_stopped_from_here_is_told(
    ask: Doctor, cloud: Cloud, profile: str, facts: dict[str, Any], evidence: str
) -> None:
    cloud.know(**facts)
    found = ask(f'base = "aws-spot"\n{profile}')
    assert found["meter"]["state"] == "degraded"
    assert evidence in found["meter"]["evidence"]
    assert found["meter"]["mend"]
    assert not cloud.ask("stopped")


def test_a_command_that_is_not_installed_is_named(
    ask: Doctor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    found = ask('base = "aws-spot"\n[teardown]\nid = "box-1"\n')
    assert "aws is not installed here" in found["meter"]["evidence"]


def test_a_place_that_does_not_answer_is_told_with_the_reason(
    ask: Doctor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("perdure.launch.channel.ATTEMPTS", 1)
    config = tmp_path / "ssh_config"
    config.write_text("Host box\n  HostName 127.0.0.1\n  Port 1\n")
    found = ask(f'base = "generic-ssh"\n[launch]\nhost = "box"\nssh_config = "{config}"\n')
    assert found["place"]["state"] == "degraded"
    assert "did not answer" in found["place"]["evidence"]


@pytest.mark.parametrize(
    ("base", "evidence"),
    [
        ("generic-ssh", "the profile has no box"),
        ("local", "it is this machine"),
        ("colab", "a session has no address"),
    ],
)
def test_a_place_without_an_address_is_not_asked(ask: Doctor, base: str, evidence: str) -> None:
    found = ask(f'base = "{base}"\n')
    assert found["place"]["state"] == "note"
    assert evidence in found["place"]["evidence"]
    assert "facts say where they were read" in found["sources"]["evidence"]


def test_facts_that_were_read_long_ago_are_to_be_looked_at_again(ask: Doctor) -> None:
    old = '[[sources]]\nfacts = ["spot_grace"]\nwhere = "x"\nread = "2020-01"\n'
    found = ask(f'base = "aws-spot"\nspot_grace = 60.0\n{old}')
    assert found["sources"]["state"] == "degraded"
    assert "the oldest 2020-01" in found["sources"]["evidence"]
    assert "look again" in found["sources"]["mend"]
