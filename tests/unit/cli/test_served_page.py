"""What another machine's page says of itself: a box that lies sends nobody's browser anywhere."""

import json
import os
import signal
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs
from tests.waiting import wait_until

from perdure.cli.app import run_command
from perdure.cli.page import dash
from perdure.cli.page.dash import read_served
from perdure.launch import exchange
from perdure.launch.catalog import load_profile
from perdure.launch.records import write_record
from perdure.model.errors import PlatformError
from perdure.model.platforms.launching import LaunchRecord

OWN = "http://127.0.0.1:4000/job?token=abc"


def test_its_own_addresses_are_taken() -> None:
    said = json.dumps({"port": 4000, "pid": 7, "urls": {"view": OWN}}).encode()
    served = read_served(said, "box")
    assert (served.port, served.urls) == (4000, {"view": OWN})


@pytest.mark.parametrize(
    "url",
    [
        "file:///etc/passwd", "http://127.0.0.1:4001/", "http://evil.example/", "",
        f"{OWN}\x1b[2J", f"{OWN} --incognito", f"{OWN}‮", "http://127.0.0.1:4000.evil.example/",
    ],
)  # fmt: skip
def test_others_are_not(url: str) -> None:
    said = json.dumps({"port": 4000, "urls": {"view": OWN, "operate": url}}).encode()
    with pytest.raises(PlatformError, match="box shows a page that is not its own"):
        read_served(said, "box")


@pytest.mark.parametrize(
    "said",
    [
        b"", b"perdure: error: no job `x`", b'{"error": "no job"}', b'{"port": "4000", "urls": {}}',
        b'{"port": 4000, "urls": {"view": 1}}', b'{"port": 4000, "urls"', b"\xff\x1b[2J" * 20_000,
    ],
)  # fmt: skip
def test_what_is_no_page_is_said_in_one_short_line(said: bytes) -> None:
    with pytest.raises(PlatformError) as caught:
        read_served(said, "box")
    assert len(caught.value.message) < 600
    assert "\x1b" not in caught.value.message


@pytest.mark.parametrize("login", ["", "echo Welcome; "])
def test_a_machine_that_lets_in_and_says_nothing_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], login: str
) -> None:
    ssh = tmp_path / "bin/ssh"
    ssh.parent.mkdir()
    ssh.write_text(f"#!/bin/sh\n{login}echo $$ > {tmp_path}/pid\nexec sleep 3600\n")
    ssh.chmod(0o755)
    monkeypatch.setenv("PATH", f"{ssh.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("PERDURE_HOME", str(tmp_path))
    monkeypatch.setattr(dash, "_SILENCE_S", 0.5)
    profile = load_profile("generic-ssh", str(tmp_path)).profile
    profile = structs.replace(profile, launch=structs.replace(profile.launch, host="box"))
    record = LaunchRecord(job="far", profile=profile, place="/b", home="/b/s", python="python3")
    write_record(str(tmp_path), record)
    pid, listen = tmp_path / "pid", exchange.listen

    def listen_once_it_runs(*words: Any) -> Any:
        wait_until(lambda: pid.exists() and pid.read_text().strip(), "ssh")
        return listen(*words)

    monkeypatch.setattr(exchange, "listen", listen_once_it_runs)
    before = signal.getsignal(signal.SIGTERM)
    try:
        assert run_command(["dash", "far", "--port", "0"]) == 3
    finally:
        signal.signal(signal.SIGTERM, before)
    told = capfd.readouterr().err.splitlines()
    assert [line.partition(":")[0] for line in told] == ["perdure", "hint"]
    assert "says nothing for 0.5 s" in told[0]
    assert not Path("/proc", pid.read_text().strip()).exists()


def test_a_page_from_elsewhere_takes_no_address_of_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PERDURE_HOME", str(tmp_path))
    profile = load_profile("generic-ssh", str(tmp_path)).profile
    profile = structs.replace(profile, launch=structs.replace(profile.launch, host="box"))
    record = LaunchRecord(job="far", profile=profile, place="/b", home="/b/s", python="python3")
    write_record(str(tmp_path), record)
    (tmp_path / "pem").write_text("")
    assert run_command(["dash", "far", "--cert", str(tmp_path / "pem")]) == 2
    assert "--host and --cert are for jobs of this machine" in capsys.readouterr().err


@pytest.mark.parametrize("told", ["", "echo forwarded; "], ids=["taken", "forwarded"])
def test_a_stranger_at_the_port_here_is_not_taken_for_the_way_to_the_box(told: str) -> None:
    """He takes the port while the box starts its server, and would get the token."""
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        port = stranger.getsockname()[1]
        words = ["sh", "-c", f"{told}exec sleep 0.5"]
        with subprocess.Popen(words, stdout=subprocess.PIPE) as way:
            if told:
                dash._wait_port(port, way)
            else:
                with pytest.raises(PlatformError, match="cannot be forwarded"):
                    dash._wait_port(port, way)
