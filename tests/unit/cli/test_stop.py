"""P7: "torn down" is what the platform says, not the exit code of a command.

The shipped profiles' own commands run, with the real curl, against an API that is played here as it
is documented.
"""

import http.server
import json
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.gate_site import Site, make_site, write_tensors
from tests.waiting import PATIENCE_S

from perdure.launch.catalog import load_profile
from perdure.launch.results import gone

pytestmark = [
    pytest.mark.skipif(not shutil.which("rsync"), reason="no rsync"),
    pytest.mark.skipif(not shutil.which("curl"), reason="no curl"),
]
KEY = "a secret's value"
STATES = {
    "runpod": ('{"id": "box-1", "desiredStatus": "%s"}', "RUNNING"),
    "vastai": ('{"instances": {"id": 1, "actual_status": "%s"}}', "running"),
    "lambda": ('{"data": {"id": "box-1", "status": "%s"}}', "active"),
}


class Api:
    """The API of one platform with the machine `box-1`; `lag` questions later it is gone."""

    def __init__(self, platform: str) -> None:
        self.platform, self.lag = platform, 2
        self.stopped = False
        self.refuse: list[int] = []
        """Codes with which the next requests to stop are answered."""
        self.asked: list[tuple[str, str]] = []
        api = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def answer(self) -> None:
                size = int(self.headers.get("Content-Length", 0))
                body = self.rfile.read(size).decode()
                code, text = api.decide(
                    self.command, self.path, body, self.headers.get("Authorization", "")
                )
                self.send_response(code)
                self.end_headers()
                self.wfile.write(text.encode())

            do_GET = do_POST = do_DELETE = answer

            def log_message(self, *args: Any) -> None: ...

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(target=self.server.serve_forever, name="played-api")
        self.thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_port}"

    def decide(self, method: str, path: str, body: str, key: str) -> tuple[int, str]:
        self.asked.append((method, path))
        if key != f"Bearer {KEY}":
            return 401, '{"error": "unauthorized"}'
        named = path.rstrip("/").rpartition("/")[2]
        if method == "POST":
            named = json.loads(body)["instance_ids"][0]
        if named != "box-1":
            return 404, '{"error": "not found"}'
        if method != "GET":
            if self.refuse:
                return self.refuse.pop(0), '{"error": "not now"}'
            self.stopped = True
            return 200, "{}"
        text, state = STATES[self.platform]
        if not self.stopped:
            return 200, text % state
        self.lag -= 1
        if self.lag == 1:
            return 429, '{"error": "too many requests"}'
        return (200, text % "on its way") if self.lag > 0 else (404, '{"error": "not found"}')

    def close(self) -> None:
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()


@pytest.fixture
def site(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Site:
    return make_site(tmp_path, monkeypatch, capsys)


@pytest.fixture(params=list(STATES))
def api(
    request: pytest.FixtureRequest, site: Site, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Api]:
    name = request.param
    played = Api(name)
    short = {"runpod": "RUNPOD", "vastai": "VAST", "lambda": "LAMBDA"}[name]
    monkeypatch.setenv(f"{short}_API_KEY", KEY)
    monkeypatch.setenv(f"{short}_API", played.url)
    monkeypatch.setattr(gone, "PAUSE_S", 0.02)
    teardown = load_profile(name, "/nonexistent").profile.teardown
    site.set_profile(teardown=msgspec.structs.replace(teardown, id="box-1", gone_wait_s=PATIENCE_S))
    write_tensors(site.job / "project" / "best.safetensors")
    yield played
    played.close()


def set_teardown(site: Site, **changes: Any) -> None:
    site.set_profile(teardown=msgspec.structs.replace(site.record.profile.teardown, **changes))


def test_torn_down_is_said_once_the_platform_says_that_it_is_gone(site: Site, api: Api) -> None:
    """P7: through an answer that it is on its way, and one that there were too many questions."""
    site.pull()
    site.verify()
    api.lag = 4
    api.refuse = [500]
    set_teardown(site, id="")
    assert "--id ID" in site.teardown(code=4)
    assert "cannot be an id" in site.teardown("--id", "../x", code=2)
    said = site.teardown("--id", "box-1")
    assert "gpt: torn down" in said
    assert "too many requests" in said
    assert "once more" in said
    assert api.lag <= 0
    assert site.read_record().torn_down_s > site.read_record().stop_asked_s > 0


@pytest.mark.parametrize("api", ["lambda"], indirect=True)
def test_a_machine_that_is_not_gone_is_not_torn_down(site: Site, api: Api) -> None:
    """P7: exit code 0 of the stop command was all that was asked for."""
    site.pull()
    site.verify()
    api.lag = 10_000
    set_teardown(site, gone_wait_s=0.3)
    said = site.teardown(code=3)
    assert "stop was asked for; generic-ssh does not say that generic-ssh is gone" in said
    assert "torn down" not in said
    record = site.read_record()
    assert record.torn_down_s == 0
    assert record.stop_asked_s > 0
    api.lag = 1
    assert "not gone" not in site.run("status")
    shutil.rmtree(site.box)
    assert "gpt: torn down" in site.run("teardown", "gpt", "--confirm", "gpt")


@pytest.mark.parametrize("api", ["runpod"], indirect=True)
def test_an_id_that_the_platform_does_not_know_stops_nothing(site: Site, api: Api) -> None:
    """P7: a wrong id, a wrong account, a key that is not there."""
    site.pull()
    site.verify()
    set_teardown(site, id="box-2")
    assert "says that there is no box-2" in site.teardown(code=4)
    set_teardown(site, id="")
    assert "the profile has no teardown.id" in site.teardown(code=4)
    assert not api.stopped
    set_teardown(site, id="box-1", gone_wait_s=0.0)
    api.refuse = [401] * 9
    said = site.teardown(code=3)
    assert "the stop command ended with 22" in said
    assert "THE METER MAY STILL RUN" in said
    assert site.read_record().torn_down_s == 0


@pytest.mark.parametrize("api", ["vastai"], indirect=True)
def test_a_box_that_was_taken_away_is_gone_already(site: Site, api: Api) -> None:
    """P7: what the platform has taken is closed without a stop that succeeds."""
    site.pull()
    site.verify()
    api.stopped, api.lag = True, 0
    api.refuse = [404] * 9
    assert "gpt: torn down" in site.teardown("--box-is-gone")


def test_a_profile_that_cannot_ask_leaves_it_to_a_person(site: Site) -> None:
    """P7: a stop command of one's own, and nothing that says that the machine is gone."""
    write_tensors(site.job / "project" / "best.safetensors")
    site.pull()
    site.verify()
    set_teardown(site, gone_command=())
    said = site.teardown(code=3)
    assert "nobody says that generic-ssh is gone" in said
    assert site.stopped.exists()
    assert site.read_record().torn_down_s == 0
    assert "torn down" in site.teardown("--by-hand")


def test_an_id_cannot_be_a_path() -> None:
    """P7: it becomes part of a URL and of a command."""
    for bad in ("..", "a/b", "-x", "$(x)", "a b"):
        with pytest.raises(msgspec.ValidationError):
            msgspec.convert({"id": bad}, type(load_profile("runpod", "/x").profile.teardown))


def test_the_key_is_in_no_argument(site: Site, api: Api) -> None:
    """P7: arguments are seen by everybody on the machine."""
    for words in (site.record.profile.teardown.stop_command,
                  site.record.profile.teardown.gone_command):  # fmt: skip
        assert "-K -" in words[2]
        assert "_API_KEY" not in words[2].partition("| curl")[2]
