"""What of a job's server outlives its runs, and what does not."""

import socket
from pathlib import Path

import pytest

from perdure.adapters.nats import NatsServer
from perdure.files.private import locate_job
from perdure.model.errors import PlatformError
from perdure.model.job import JobSpec
from perdure.service.access.credentials import keep_endpoint, make_server, set_certificate
from perdure.service.jobfiles import write_document
from perdure.service.placement import Placement, load_placement

SPEC = JobSpec(name="far", script="train.py", nodes=2, remote=1)


def start_run(folder: Path, number: int, address: str = "127.0.0.2") -> NatsServer:
    """Return the server of one run, as `perdure run` makes it, not started."""
    placement = folder / "placement.json"
    placement.write_text(f'{{"bind": "{address}", "door": "credentials/door.json"}}')
    paths = locate_job(str(folder / f"home{number}"), "far")
    server = make_server(SPEC, paths, load_placement(str(placement), 1))
    set_certificate(server, SPEC.nats)
    return server


def find_passwords(server: NatsServer) -> dict[str, str]:
    return {user.name: user.password for user in server.users}


def test_an_invitation_is_good_for_the_next_run_and_other_logins_are_not(tmp_path: Path) -> None:
    before, after = (start_run(tmp_path, number) for number in range(2))
    assert before.port == after.port
    one, other = find_passwords(before), find_passwords(after)
    assert [name for name in one if one[name] == other[name]] == ["joiner"]
    door = tmp_path / "credentials" / "door.json"
    assert door.stat().st_mode & 0o777 == 0o600
    door.write_text("")  # Power was lost before it was there.
    assert find_passwords(start_run(tmp_path, 2))["joiner"] != one["joiner"]


def test_a_port_that_was_taken_meanwhile_and_another_address_make_another_door(
    tmp_path: Path,
) -> None:
    before = start_run(tmp_path, 0)
    with socket.create_server(("127.0.0.2", before.port)):
        after = start_run(tmp_path, 1)
    assert after.port != before.port
    assert find_passwords(after)["joiner"] == find_passwords(before)["joiner"]
    moved = start_run(tmp_path, 2, "127.0.0.3")
    assert find_passwords(moved)["joiner"] != find_passwords(before)["joiner"]


def test_a_disk_that_refuses_the_endpoint_is_named_in_a_line(tmp_path: Path) -> None:
    server = NatsServer(folder=str(tmp_path), token="", host="127.0.0.2")
    door = tmp_path / ("d" * 250)  # Too long for the name that it has while it is written.
    with pytest.raises(PlatformError, match="dd: File name too long"):
        keep_endpoint(server, str(door), certificate=False)


def test_a_placement_that_perdure_itself_has_written_is_read(tmp_path: Path) -> None:
    """A replay writes one; records end in a hash."""
    placement = Placement(bind="127.0.0.2")
    write_document(str(tmp_path / "placement.json"), placement)
    assert load_placement(str(tmp_path / "placement.json"), 1) == placement
