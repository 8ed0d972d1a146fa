"""What root types about another user's state directory runs nothing of it and sends no secret."""

import json
import os
import shlex
import socket
import threading
from pathlib import Path

import pytest
from msgspec import structs
from tests.unit.cli.test_hostile_job import lay_down, run

from perdure.launch.catalog import load_profile
from perdure.launch.records import write_record
from perdure.model.platforms.launching import LaunchRecord

STRANGER = 65534
INFO = b'INFO {"server_id":"x","version":"2.10.0","max_payload":1048576}\r\n'
pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root reads another user's files")


def give_away(home: Path) -> None:
    """Make another user the owner of all in `home`."""
    for path in (home, *home.rglob("*")):
        os.chown(path, STRANGER, STRANGER, follow_symlinks=False)


@pytest.mark.parametrize("verb", ["status", "logs", "stop"])
def test_a_launch_of_another_user_runs_no_command_of_it(tmp_path: Path, verb: str) -> None:
    """ssh was run with that user's options, of which one names a program to run."""
    home, ran = tmp_path / "home", tmp_path / "ran"
    profile = load_profile("generic-ssh", str(home)).profile
    options = (f"ProxyCommand=touch {shlex.quote(str(ran))}",)
    launch = structs.replace(profile.launch, host="box", ssh_options=options)
    record = LaunchRecord(
        job="evil", profile=structs.replace(profile, launch=launch), place="/b", home="/b/s",
        python="python3", launched_s=1.0,
    )  # fmt: skip
    write_record(str(home), record)
    lay_down(home, "whole")
    give_away(home)
    done = run(home, "-m", "perdure", verb, "evil")
    assert done.returncode == 3, done.stderr
    assert "belongs to another user" in done.stderr
    assert "hint: " in done.stderr
    assert not ran.exists()
    listed = run(home, "-m", "perdure", "status", "--all")
    assert listed.returncode == 0
    assert "whole" in listed.stdout


def lay_down_store(home: Path, endpoint: dict[str, object]) -> Path:
    """Make a job whose journal is in a store of its server alone."""
    folder = lay_down(home, "evil")
    (folder / "journal.jsonl").unlink()
    (folder / "endpoint.json").write_text(
        json.dumps({"token": "t", "clock_offset_s": 0} | endpoint)
    )
    return folder


def test_no_server_is_started_in_a_folder_of_another_user(tmp_path: Path) -> None:
    """nats-server's files were written where that user's links led."""
    home, victim = tmp_path / "home", tmp_path / "victim"
    (victim / "jetstream/a/streams/b").mkdir(parents=True)
    (victim / "nats-server.conf").write_text("port: 4222\n")
    (victim / "old.ports").write_text("")
    folder = lay_down_store(home, {"url": "nats://127.0.0.1:1"})
    (folder / "nats").symlink_to(victim)
    give_away(home)
    for verb in ("report", "status", "events"):
        done = run(home, "-m", "perdure", verb, "evil")
        assert done.returncode == 3, done.stderr
        assert "belongs to another user" in done.stderr
    assert sorted(path.name for path in victim.iterdir()) == [
        "jetstream", "nats-server.conf", "old.ports",
    ]  # fmt: skip
    assert (victim / "nats-server.conf").read_text() == "port: 4222\n"


def test_no_login_goes_to_a_server_that_another_user_names(tmp_path: Path) -> None:
    """A job's document named root's own file of credentials, and an address to send it to."""
    home, heard = tmp_path / "home", list[bytes]()
    secret = tmp_path / "mine.json"
    secret.write_text('{"user": "root", "password": "not-for-you"}')
    secret.chmod(0o600)
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.2)
        over = threading.Event()

        def listen() -> None:
            while not over.is_set():
                try:
                    sock, _ = server.accept()
                except TimeoutError:
                    continue
                with sock:
                    sock.settimeout(2.0)
                    sock.sendall(
                        b'INFO {"server_id":"x","version":"2.10.0","max_payload":1048576}\r\n'
                    )
                    try:
                        heard.append(sock.recv(1 << 16))
                    except OSError:
                        continue

        thread = threading.Thread(target=listen)
        thread.start()
        try:
            url = f"nats://127.0.0.1:{server.getsockname()[1]}"
            lay_down_store(home, {"url": url, "external": True, "creds": str(secret)})
            give_away(home)
            for words in (["status"], ["report", "evil"], ["status", "evil"]):
                run(home, "-m", "perdure", *words)
        finally:
            over.set()
            thread.join()
    assert not any(b"not-for-you" in data for data in heard)
