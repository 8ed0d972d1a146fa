"""What another machine's page says of itself: a box that lies sends nobody's browser anywhere."""

import json

import pytest

from perdure.cli.page.dash import read_served
from perdure.model.errors import PlatformError

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
