"""How a rank that others have started finds the lighthouse of `perdure serve`, or does not."""

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from perdure.files.private import find_private
from perdure.model.bus.lighthouse import PATIENCE
from perdure.model.paths import lighthouse_door
from perdure.worker.torchft.elsewhere import find_door, prepare_elsewhere


@pytest.fixture
def port(tmp_path: Path) -> Iterator[int]:
    """A lighthouse's port, to which a socket of this user's belongs."""
    with socket.socket() as taken, socket.socket(socket.AF_UNIX) as line:
        taken.bind(("127.0.0.1", 0))
        number = int(taken.getsockname()[1])
        door, path = lighthouse_door(find_private("/tmp"), number), tmp_path / "ranks"
        os.makedirs(os.path.dirname(door), mode=0o700, exist_ok=True)
        line.bind(str(path))
        line.listen()
        os.symlink(path, door)
        try:
            yield number
        finally:
            os.unlink(door)


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1"])
def test_the_url_alone_leads_to_the_line(port: int, host: str) -> None:
    url = f"http://{host}:{port}"
    assert find_door({"TORCHFT_LIGHTHOUSE": url}) == lighthouse_door(find_private("/tmp"), port)
    assert find_door({"TORCHFT_LIGHTHOUSE": url, "PERDURE_RING": "x"}) == "", "it has one already"


@pytest.mark.parametrize("url", ["", "http://", "http://[", "http://localhost", "http://a:b", "x"])
def test_what_is_no_url_leads_nowhere(port: int, url: str) -> None:
    assert find_door({"TORCHFT_LIGHTHOUSE": url}) == ""


def test_a_lighthouse_on_another_machine_is_not_this_one(port: int) -> None:
    assert find_door({"TORCHFT_LIGHTHOUSE": f"http://192.0.2.7:{port}"}) == ""


def test_nobody_listens_at_another_port(port: int) -> None:
    assert find_door({"TORCHFT_LIGHTHOUSE": f"http://localhost:{port ^ 1}"}) == ""


def test_a_socket_that_has_gone_is_no_line(port: int, tmp_path: Path) -> None:
    (tmp_path / "ranks").unlink()
    assert find_door({"TORCHFT_LIGHTHOUSE": f"http://localhost:{port}"}) == ""


def test_a_manager_is_as_patient_as_the_lighthouse_unless_its_user_says_otherwise(
    port: int,
) -> None:
    environ = {"TORCHFT_LIGHTHOUSE": f"http://localhost:{port}", "TORCHFT_QUORUM_RETRIES": "3"}
    prepare_elsewhere(environ)
    assert environ["TORCHFT_QUORUM_RETRIES"] == "3"
    assert environ["TORCHFT_QUORUM_TIMEOUT_SEC"] == PATIENCE["TORCHFT_QUORUM_TIMEOUT_SEC"]
    elsewhere = {"TORCHFT_LIGHTHOUSE": "http://192.0.2.7:1"}
    prepare_elsewhere(elsewhere)
    assert len(elsewhere) == 1


def test_a_socket_that_a_killed_lighthouse_has_left_makes_no_manager_wait_for_a_day(
    port: int, tmp_path: Path
) -> None:
    (tmp_path / "ranks").unlink()
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(tmp_path / "ranks"))
    environ = {"TORCHFT_LIGHTHOUSE": f"http://localhost:{port}"}
    assert find_door(environ)
    prepare_elsewhere(environ)
    assert len(environ) == 1
