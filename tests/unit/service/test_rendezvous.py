"""What nodes that share a secret have in common, and what nodes without one are told."""

import os
import stat
import threading
from pathlib import Path

import msgspec
import pytest

from perdure.launch.environment import RDZV_SECRET as SECRET
from perdure.model.errors import ConfigError
from perdure.model.events import digest_secret
from perdure.service.access import rendezvous
from perdure.service.access.credentials import KeptEndpoint
from perdure.service.access.rendezvous import (
    FirstNode,
    choose_home,
    derive,
    find_secret,
    make_invitation,
    write_placement,
)
from perdure.service.jobfiles import JobLock, read_document
from perdure.service.jobfolders import paths_of
from perdure.service.placement import load_placement

GOOD = "a secret of more than enough characters"


def test_the_same_secret_and_name_give_the_same_and_any_other_another() -> None:
    ours = derive(GOOD, "job")
    assert ours == derive(GOOD, "job")
    for theirs in (derive(GOOD + "x", "job"), derive(GOOD, "job2")):
        assert not set(msgspec.structs.astuple(ours)) & set(msgspec.structs.astuple(theirs))
    values = [value for value in msgspec.structs.astuple(ours) if isinstance(value, str)]
    assert len({*values, ours.seed.hex()}) == 4


def test_where_the_secret_comes_from(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text(GOOD + "\n")
    file.chmod(0o600)
    environ = {SECRET: "v" * 20, "HOME": "/"}
    assert find_secret(environ, str(file), str(tmp_path), "10.0.0.1") == "v" * 20
    assert environ == {"HOME": "/"}, "no rank inherits it"
    assert find_secret({}, str(file), str(tmp_path), "10.0.0.1") == GOOD


def test_without_a_secret_a_node_beyond_this_machine_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="share no secret") as caught:
        find_secret({}, "", str(tmp_path), "10.0.0.1")
    assert SECRET in caught.value.hint
    assert "secret_file" in caught.value.hint
    assert "PERDURE_HOME" in caught.value.hint
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("address", ["127.0.0.1", "10.0.0.1"])
def test_in_a_shared_folder_the_first_who_comes_makes_one_for_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    if address != "127.0.0.1":
        monkeypatch.setattr(rendezvous, "find_filesystem", lambda place: "nfs4")
    found: list[str] = []

    def come() -> None:
        found.append(find_secret({}, "", str(tmp_path), address))

    nodes = [threading.Thread(target=come) for _ in range(8)]
    for node in nodes:
        node.start()
    for node in nodes:
        node.join()
    assert len(found) == 8
    assert len(set(found)) == 1
    assert len(found[0]) == 64
    (file,) = (tmp_path / "rendezvous").iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_a_secret_that_is_none_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    for data, mode, match in (
        (b"short", 0o600, "5 characters"),
        (b"", 0o600, "0 characters"),
        (b"x" * 5000, 0o600, "characters"),
        (b"\xff" * 40, 0o600, "UTF-8"),
        (GOOD.encode(), 0o644, "others can read"),
    ):
        file.write_bytes(data)
        file.chmod(mode)
        with pytest.raises(ConfigError, match=match):
            find_secret({}, str(file), str(tmp_path), "10.0.0.1")
    with pytest.raises(ConfigError, match="No such file"):
        find_secret({}, str(tmp_path / "none"), str(tmp_path), "10.0.0.1")
    with pytest.raises(ConfigError, match=SECRET):
        find_secret({SECRET: ""}, "", str(tmp_path), "127.0.0.1")


def test_the_first_node_starts_its_server_with_what_the_others_come_by(tmp_path: Path) -> None:
    path = write_placement(GOOD, "job", str(tmp_path), "10.0.0.1", 29500)
    placement = load_placement(path, 1)
    door = read_document(placement.door, KeptEndpoint)
    invitation = make_invitation(GOOD, "job", "10.0.0.1", 29500)
    assert door is not None
    assert invitation.endpoint.url == f"tls://{door.host}:{door.port}"
    assert door.fixed
    assert door.password == invitation.endpoint.token
    (invited,) = placement.invited
    assert invited.id == invitation.id
    assert invited.digest == digest_secret(invitation.secret)
    text = Path(path).read_text()
    for secret in (GOOD, invitation.secret, invitation.endpoint.token):
        assert secret not in text
    folder = tmp_path / "jobs" / "job" / "rendezvous"
    assert sorted(os.listdir(folder)) == ["door.json", "placement.json"]
    assert stat.S_IMODE((folder / "door.json").stat().st_mode) == 0o600


def test_on_loopback_one_is_the_first_and_each_has_a_folder_of_its_own(tmp_path: Path) -> None:
    port = os.getpid()  # Not one that anybody listens on: it is part of a name.
    first, second = FirstNode("127.0.0.1", port), FirstNode("127.0.0.1", port)
    assert (first.taken, second.taken) == (True, False)
    first.release()
    third = FirstNode("127.0.0.1", port)
    assert third.taken
    third.release()
    home = choose_home(str(tmp_path), "job")
    assert home.startswith(str(tmp_path))
    lock = JobLock(paths_of(home, "job"))
    assert choose_home(str(tmp_path), "job") == f"{home}-2"
    lock.release()
    assert choose_home(str(tmp_path), "job") == home
