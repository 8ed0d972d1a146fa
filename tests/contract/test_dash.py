"""The server of `perdure dash`, asked over HTTP: what it shows, and whom it lets in."""

import asyncio
import contextlib
import http.client
import itertools
import json
import os
import re
import shutil
import signal
import socket
import ssl
import threading
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace

import pytest
from msgspec import structs
from starlette.requests import Request

from perdure.adapters.nats.certificates import make_certificate
from perdure.cli.app import run_command
from perdure.cli.jobs import find_here
from perdure.cli.looking.story import tell_story
from perdure.cli.page import app
from perdure.cli.page.app import Site
from perdure.cli.page.door import Access, Door, Role, Way
from perdure.cli.page.reading import JobReading
from perdure.cli.page.runs import name_run
from perdure.drill.card import KeptDrill
from perdure.failpoints import SWITCH
from perdure.model.events import OperatorNoted, VerdictReached
from perdure.model.verdicts import Culprit, Verdict
from perdure.service.results import keep_result
from perdure_lab.results import KeptReplay
from tests.journals import Story, tell
from tests.pages import Page, lay_down, read_text, serve
from tests.results import CARD, REPLAY
from tests.waiting import PATIENCE_S, wait_until

ROOT = Path(__file__).resolve().parents[2]
POISON = "</td><script>window.hit=1</script><img src=x onerror=hit()>\x1b]0;x\x07{{7*7}}'\""


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    home = tmp_path_factory.mktemp("home")
    lay_down(home)
    story = tell(Story())
    story.write(OperatorNoted(id="n", text=POISON, step=3, at_s=story.now, who=POISON))
    lay_down(home, "poisoned", story)
    logs = home / "jobs/poisoned/logs/ranks/g2"
    (logs / "rank-0.out").write_text(f"{POISON}\nneedle in the hay\n")
    (home / "jobs/poisoned/logs/ranks/g0").mkdir()
    (home / "jobs/poisoned/logs/ranks/g0/rank-1.err").write_text("an older needle\n")
    with serve(home, "--operate") as served:
        served.enter()
        yield served


def test_a_stranger_sees_nothing(page: Page) -> None:
    known, page.cookie = page.cookie, ""
    try:
        for path in ("/", "/jobs/job", "/jobs/job/live", "/jobs/job/curves", "/?token=wrong"):
            status, headers, text = page.ask(path)
            assert status == 401, path
            assert "set-cookie" not in headers
            assert "job" not in read_text(text)
        page.cookie = f"perdure-{page.port}=wrong"
        assert page.ask("/")[0] == 401
    finally:
        page.cookie = known


def test_the_cookie_is_for_this_site_only(page: Page) -> None:
    _, headers, _ = page.ask(page.urls["view"].partition(page.host)[2])
    assert "httponly" in headers["set-cookie"].lower()
    assert "samesite=strict" in headers["set-cookie"].lower()


@pytest.mark.parametrize("host", ["evil.example.com", "127.0.0.1.evil.example.com", "", "[::2]"])
def test_another_name_of_the_host_is_refused(page: Page, host: str) -> None:
    """A site whose name was made to lead here has the browser send its own."""
    assert page.ask("/", Host=host)[0] == 400


HOSTS_OF_ATTACKERS = [
    "127.0.0.1:{port}/static/?", "127.0.0.1/static/?", "127.0.0.1:1/static/#", "[::1]/static/?",
    "x@127.0.0.1", "127.0.0.1:", "127.0.0.1:80:80", "localhost.", "::1", "[::1",
    "127.0.0.1:\u0663".encode().decode("latin-1"), "127.0.0.1:1\\static", "127.0.0.1:1,localhost",
]  # fmt: skip


@pytest.mark.parametrize("host", HOSTS_OF_ATTACKERS)
def test_a_host_header_with_more_than_a_name_and_a_port_is_refused(page: Page, host: str) -> None:
    """Starlette 1.0 and older put the header into a URL, whose path is the attacker's then."""
    for path in ("/", "/results", "/jobs/job", "/jobs/job/curves", "/jobs/job/report.html"):
        sent = f"GET {path} HTTP/1.1\r\nHost: {host.format(port=page.port)}\r\n\r\n"
        status, answer = page.send_raw(sent)
        assert status == 400, path
        assert "SIGKILL" not in answer
        assert "poisoned" not in answer


def test_a_path_that_names_no_role_answers_nobody(tmp_path: Path) -> None:
    asked = []

    async def answer(request: Request) -> None:
        asked.append(request)

    async def ask(path: str, cookie: str) -> int:
        async def send(message: dict[str, object]) -> None:
            told.append(message)

        told: list[dict[str, object]] = []
        headers = [(b"host", b"localhost"), (b"cookie", f"perdure-1={cookie}".encode())]
        scope = {
            "type": "http", "method": "GET", "path": path, "query_string": b"", "headers": headers,
        }  # fmt: skip
        await door(scope, None, send)
        return told[0]["status"]

    access = Access(frozenset({"localhost"}), 1, "viewer", "operator")
    door = Door([Way("/new", answer), Way("/acts", answer, Role.OPERATOR)], {}, access, print)
    asks = [
        ("/new", ""),
        ("/new", "viewer"),
        ("/new", "operator"),
        ("/none", ""),
        ("/acts", "viewer"),
    ]
    statuses = [asyncio.run(ask(path, cookie)) for path, cookie in asks]
    assert statuses == [401, 403, 403, 401, 403]
    assert not asked


@pytest.mark.parametrize("host", ["127.0.0.1", "LOCALHOST:1", "[::1]", "[::1]:{port}"])
def test_a_host_header_that_is_a_name_and_a_port_is_known(page: Page, host: str) -> None:
    assert page.ask("/static/live.js", Host=host.format(port=page.port))[0] == 200


def test_an_address_in_the_request_line_lets_no_stranger_in(page: Page) -> None:
    for target in (
        f"http://{page.host}/static/../jobs/job", "/static/../jobs/job", "/static/%2e%2e/jobs/job",
        "/static//jobs/job", "//static/jobs/job",
    ):  # fmt: skip
        status, answer = page.send_raw(f"GET {target} HTTP/1.1\r\nHost: {page.host}\r\n\r\n")
        assert status in (401, 404), target
        assert "SIGKILL" not in answer


IDLE = 200


@pytest.mark.parametrize("secure", [False, True], ids=["plain", "tls"])
def test_idle_connections_of_strangers_keep_nobody_from_the_page(
    tmp_path: Path, secure: bool
) -> None:
    """The server may open 160 files. What has shown a token, or is of another address, stays."""
    lay_down(tmp_path)
    words, tls = [], None
    if secure:
        cert, key = make_certificate(str(tmp_path), "127.0.0.1")
        words = ["--cert", cert, "--key", key]
        tls = ssl.create_default_context(cafile=cert)
        tls.check_hostname = False

    def connect(port: int, source: str = "127.0.0.1") -> socket.socket:
        return socket.create_connection(
            ("127.0.0.1", port), timeout=PATIENCE_S, source_address=(source, 0)
        )

    def send(connection: socket.socket, path: str, page: Page) -> http.client.HTTPResponse:
        head = f"GET {path} HTTP/1.1\r\nHost: {page.host}\r\nCookie: {page.cookie}\r\n\r\n"
        connection.sendall(head.encode())
        answer = http.client.HTTPResponse(connection)
        answer.begin()
        return answer

    with contextlib.ExitStack() as stack:
        page = stack.enter_context(serve(tmp_path, "job", *words, files_max=160))

        def open_one(source: str = "127.0.0.1") -> socket.socket:
            opened = connect(page.port, source)
            opened = tls.wrap_socket(opened) if tls else opened
            return stack.enter_context(opened)

        with open_one() as first:
            path = page.urls["view"].partition(page.host)[2]
            page.cookie = send(first, path, page).getheader("set-cookie", "").partition(";")[0]
        live = send(open_one(), "/jobs/job/live", page)
        assert live.readline() == b"event: sections\n"
        waiting = open_one("127.0.0.3")
        for _ in range(IDLE):
            stack.enter_context(connect(page.port, "127.0.0.2"))
        assert send(waiting, "/jobs/job", page).status == 200
        assert send(open_one("127.0.0.2"), "/jobs/job", page).status == 200
        while b"event: sections" not in live.readline():
            pass


def test_an_installed_httptools_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would keep headers of any length for a stranger."""
    lay_down(tmp_path)
    (tmp_path / "httptools.py").write_text("")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    with serve(tmp_path) as page:
        assert page.ask("/")[0] == 401


def test_the_address_of_localhost_leads_to_nobody_else(tmp_path: Path) -> None:
    """A browser looks for localhost at [::1] first, where another user may listen."""
    lay_down(tmp_path)
    with serve(tmp_path, "--host", "localhost") as page:
        assert page.urls["view"].startswith(f"http://127.0.0.1:{page.port}/")
        page.enter()
        assert page.ask("/jobs/job")[0] == 200


def test_every_answer_forbids_what_is_not_the_pages_own(page: Page) -> None:
    for path in ("/", "/jobs/job", "/static/live.js", "/nowhere", "/jobs/none"):
        policy = page.ask(path)[1]["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert "frame-ancestors 'none'" in policy
    for path in ("/", "/jobs/job"):
        html = page.ask(path)[2]
        assert not re.search(r"<[^>]+\s(style|on\w+)=|<script(?! src=\"/static/)", html)
        assert not re.search(r"(?:src|href)=\"(?:https?:)?//", html)


def test_what_others_have_written_is_no_markup(page: Page) -> None:
    whole = page.ask("/jobs/poisoned")[2]
    live = page.ask("/jobs/poisoned/live?at=9999")[2]
    for text in (whole, json.loads(live.partition("data: ")[2].partition("\n")[0]).__repr__()):
        assert "<script>window" not in text
        assert "<img" not in text
        assert "\x1b" not in text
        assert "&lt;script&gt;window.hit=1" in text
        assert "{{7*7}}" in text


def test_what_commands_have_found_is_listed_and_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PERDURE_HOME", str(tmp_path))
    trace = tmp_path / "t.csv"
    trace.write_text("0,add,a\n0,add,b\n60000,remove,b\n120000,add,c\n600000,remove,a\n")
    profile = ROOT / "examples/cost_profile.json"
    assert run_command(["trace", "show", str(trace)]) == 0
    assert run_command(["trace", "simulate", str(trace), "--policy", "perdure,torchft"]) == 0
    words = ["--devices", "2", "--global-batch", "8", "--memory", "16GB"]
    assert run_command(["plan", str(profile), *words]) == 0
    keep_result(str(tmp_path), KeptDrill(card=CARD))
    keep_result(str(tmp_path), KeptReplay(result=REPLAY))
    with serve(tmp_path) as page:
        page.enter()
        links = dict(re.findall(r"/results/((\w+)-[\w-]+)", page.ask("/results")[2]))
        kinds = {kind: f"/results/{name}" for name, kind in links.items()}
        told = {kind: read_text(page.ask(place)[2]) for kind, place in kinds.items()}
        assert "90.9% of the most" in read_text(page.ask("/results")[2])
    assert set(told) == {"trace", "simulation", "plan", "drill", "replay"}
    assert "availability 90.9% of the most" in told["trace"]
    for kind, said in {
        "trace": ("availability", "Nodes over time"),
        "simulation": ("of U1", "torchft", "Throughput over time", "Where parameters come from"),
        "plan": ("chosen", "Stages of the chosen world", "n0/0"),
        "drill": ("FAILED (1 passed, 1 failed", "rank 0 was harmed", "the job has one node"),
        "replay": ("0.8000", "the longest time without a commit", "Committed samples a second"),
    }.items():
        for word in said:
            assert word in told[kind], (kind, word)
    assert told["replay"].index("0.8000") < told["replay"].index("Nodes over time")


def test_results_that_others_have_written_are_no_markup_and_stop_nothing(tmp_path: Path) -> None:
    rows = (structs.replace(CARD.rows[0], fault=POISON, why=POISON, verdict="failed"),)
    card = structs.replace(CARD, job=POISON, reason=POISON, rows=rows, notes=(POISON,))
    poisoned = keep_result(str(tmp_path), KeptDrill(card=card))
    system = structs.replace(REPLAY.systems[0], system=POISON)
    played = structs.replace(REPLAY, trace=POISON, reference=POISON, unit=POISON, systems=(system,))
    replay = keep_result(str(tmp_path), KeptReplay(result=played))
    folder = poisoned.parent
    (folder / f"{POISON.replace('/', '')}.json").write_text("mine")
    (folder / os.fsdecode(b"\xff")).write_text("mine")
    (folder / "drill-20250101T000000Z-00000000.json").write_text('{"type":"drill"')
    with serve(tmp_path) as page:
        page.enter()
        for path in ("/results", f"/results/{poisoned.stem}", f"/results/{replay.stem}"):
            status, headers, html = page.ask(path)
            assert status == 200
            assert "default-src 'none'" in headers["content-security-policy"]
            assert not find_acting(html)
            assert "\x1b" not in html
            assert "&lt;script&gt;window.hit=1" in html
            assert "{{7*7}}" in html
        told = read_text(page.ask("/results")[2])
        assert "drill-20250101T000000Z-00000000.json : malformed message" in told
        assert told.count("not one of perdure&#39;s") == 2
        status, _, html = page.ask("/results/drill-20250101T000000Z-00000000")
        assert (status, "malformed" in html) == (500, True)
        for name in ("drill-20250101T000000Z-00000001", "..%2fjobs", "%ff", "live%00"):
            assert page.ask(f"/results/{name}")[0] == 404, name


def find_acting(html: str) -> list[str]:
    """Return the tags and attributes of a page that could do something, but its own scripts."""
    found = []

    class Reader(HTMLParser):
        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            own = tag == "script" and str(dict(attrs).get("src")).startswith("/static/")
            found.extend([] if own or tag not in ("script", "img", "iframe", "style") else [tag])
            found.extend(name for name, _ in attrs if name == "style" or name.startswith("on"))

    Reader().feed(html)
    return found


def test_the_list_of_results_grows_by_itself(tmp_path: Path) -> None:
    with serve(tmp_path) as page:
        page.enter()
        connection = http.client.HTTPConnection("127.0.0.1", page.port, timeout=PATIENCE_S)
        headers = {"Host": page.host, "Cookie": page.cookie}
        connection.request("GET", "/results/live", headers=headers)
        answer = connection.getresponse()
        assert answer.readline() == b"event: sections\n"
        assert b"There are none yet" in answer.readline()
        keep_result(str(tmp_path), KeptDrill(card=CARD))
        while b"event: sections" not in answer.readline():
            pass
        assert b"1 passed, 1 failed" in answer.readline()
        connection.close()


def test_of_one_job_alone_no_results_are_told(tmp_path: Path) -> None:
    lay_down(tmp_path)
    path = keep_result(str(tmp_path), KeptDrill(card=CARD))
    with serve(tmp_path, "job") as page:
        page.enter()
        for place in ("/results", "/results/live", f"/results/{path.stem}"):
            status, _, html = page.ask(place)
            assert (status, CARD.job in html) == (404, False)


def test_a_job_is_shown_from_its_folder(page: Page) -> None:
    status, _, html = page.ask("/jobs/job")
    text = read_text(html)
    assert status == 200
    for word in (
        "done",
        "signal 9 (SIGKILL)",
        "ComputeHang",
        "useful",
        "checkpoints/step-00000105",
    ):
        assert word in text
    assert "rank 1" in text


def test_the_past_is_as_it_was(page: Page) -> None:
    before, after = (read_text(page.ask(f"/jobs/job?at={at}")[2]) for at in (4, 8))
    assert "SIGKILL" not in before
    assert "SIGKILL" in after
    assert "ComputeHang" not in after
    assert "as it was 4.0 s after its start" in before
    curves = json.loads(page.ask("/jobs/job/curves?at=4")[2])["curves"]["loss"]
    assert 5 < len(curves["x"]) < 23


@pytest.mark.parametrize(
    "query", ["at=nan", "at=-5", "at=1e400", "begin=5&end=1", "rank=99999999", "node=x", "rank=-1",
              "search=%00%ff", "at=" + "9" * 300],
)  # fmt: skip
def test_whatever_is_asked_for_there_is_a_page(page: Page, query: str) -> None:
    assert page.ask(f"/jobs/job?{query}")[0] == 200
    assert page.ask(f"/jobs/job/curves?{query}")[0] == 200


def test_lines_are_found_in_all_generations(page: Page) -> None:
    text = read_text(page.ask("/jobs/poisoned?search=NEEDLE")[2])
    assert "needle in the hay" in text
    assert "an older needle" in text
    assert "older" not in read_text(page.ask("/jobs/poisoned")[2])


@pytest.mark.parametrize("name", ["none", "..", "%2e%2e%2fjob", "job%00", "a" * 5000])
def test_there_is_no_other_job(page: Page, name: str) -> None:
    assert page.ask(f"/jobs/{name}")[0] in (400, 404)


def test_a_viewer_may_not_steer(page: Page) -> None:
    status, answer = page.steer("job", verb="stop")
    assert (status, answer["ok"]) == (403, False)


def test_a_verb_is_asked_from_the_page_only(page: Page) -> None:
    known = page.cookie
    try:
        page.enter("operate")
        for origin in ({}, {"Origin": "http://evil.example.com"}, {"Origin": "null"}):
            status, _, _ = page.ask("/jobs/job/ask", method="POST", body={"verb": "stop"}, **origin)
            assert status == 403, origin
        status, answer = page.steer("job", verb="stop")
        assert (status, answer["ok"]) == (200, False)
        assert "does not run: done" in answer["text"]
        for wrong in ({}, {"verb": "kill"}, {"verb": "stop", "more": 1}, {"verb": "set", "key": 3}):
            assert page.steer("job", **wrong)[0] == 400
        assert page.ask("/jobs/job/ask")[0] == 405
    finally:
        page.cookie = known


def test_the_report_is_the_commands_own(page: Page) -> None:
    status, headers, text = page.ask("/jobs/job/report.html")
    assert status == 200
    assert "attachment" in headers["content-disposition"]
    assert "Where the time went" in text


def test_a_job_that_is_gone_or_another_by_now_is_not_shown_as_it_was(tmp_path: Path) -> None:
    lay_down(tmp_path)
    with serve(tmp_path) as page:
        page.enter()
        assert "ComputeHang" in page.ask("/jobs/job")[2]
        shutil.rmtree(tmp_path / "jobs/job")
        assert page.ask("/jobs/job")[0] == 404
        story = Story()
        story.start()
        story.train(4)
        story.finish()
        lay_down(tmp_path, story=story)
        text = read_text(page.ask("/jobs/job")[2])
        assert "ComputeHang" not in text
        assert "done" in text


def test_one_job_alone(tmp_path: Path) -> None:
    lay_down(tmp_path)
    lay_down(tmp_path, "other")
    with serve(tmp_path, "job") as page:
        page.enter()
        assert page.ask("/")[1]["location"] == "/jobs/job"
        assert page.ask("/jobs/other")[0] == 404
        assert page.ask("/live")[0] == 404
        assert "other" not in page.ask("/jobs/job")[2].replace("no other job", "")


def test_what_was_shown_of_one_job_is_not_done_to_the_next(page: Page) -> None:
    known, role = page.cookie, "operate"
    try:
        page.enter(role)
        job = find_here("job", page.home)
        _, answer = page.steer("job", verb="stop", preview=False, run="1-1")
        assert "another job has begun under this name since" in answer["text"]
        _, answer = page.steer("job", verb="stop", preview=False, run=name_run(job))
        assert "does not run: done" in answer["text"]
    finally:
        page.cookie = known


def test_a_disk_that_does_not_answer_does_not_keep_it_from_ending(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lay_down(tmp_path)
    stuck = tmp_path / "stuck"
    monkeypatch.setenv(SWITCH, f"file/read=delay(1000000),about=state.json,file={stuck}")
    with serve(tmp_path) as page:
        stuck.touch()
        page.enter()
        connection = http.client.HTTPConnection("127.0.0.1", page.port, timeout=PATIENCE_S)
        connection.request("GET", "/jobs/job", headers={"Host": page.host, "Cookie": page.cookie})
        assert page.ask("/nowhere")[0] == 404  # By then the other request was taken.
        page.process.send_signal(signal.SIGINT)
        page.process.wait(PATIENCE_S)
        connection.close()


async def test_acts_that_nobody_answers_keep_nobody_from_looking(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lay_down(tmp_path)
    monkeypatch.setenv("PERDURE_HOME", str(tmp_path))
    site, over, begun = Site(str(tmp_path), Access(frozenset(), 1, "x")), threading.Event(), []

    def ask(job: object, act: object) -> str:
        begun.append(act)
        over.wait()
        return ""

    async def receive() -> dict[str, object]:
        return {"type": "http.request", "body": b'{"verb":"stop","preview":false}'}

    monkeypatch.setattr(app, "ask", ask)
    scope = {
        "type": "http", "method": "POST", "headers": [],
        "path_params": {"name": "job"},
    }  # fmt: skip
    asked = [asyncio.ensure_future(site.steer(Request(scope, receive))) for _ in range(8)]
    try:
        async with asyncio.timeout(PATIENCE_S):
            while len(begun) < 4:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            assert "job" in (await site._run(site._render_jobs))["jobs"]
    finally:
        over.set()
        await asyncio.gather(*asked)


async def test_results_that_take_long_keep_nobody_from_looking_at_jobs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The jobs are those of the site's own home, whatever the environment says by then."""
    lay_down(tmp_path / "home")
    monkeypatch.setenv("PERDURE_HOME", str(tmp_path / "elsewhere"))
    site, over = Site(str(tmp_path / "home"), Access(frozenset(), 1, "x")), threading.Event()
    monkeypatch.setattr(Site, "_render_result", lambda site, name: "" if over.wait() else "late")
    scope = {"type": "http", "method": "GET", "headers": [], "path_params": {"name": "plan-x"}}
    asked = [asyncio.ensure_future(site.show_result(Request(scope))) for _ in range(8)]
    try:
        async with asyncio.timeout(PATIENCE_S):
            await asyncio.sleep(0)
            assert "job" in (await site._run(site._render_jobs))["jobs"]
            assert site._list_others("") == ["job"]
        assert not any(each.done() for each in asked)
    finally:
        over.set()
        await asyncio.gather(*asked)


async def test_looks_that_take_long_are_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine is the ranks', of which a page of 10,000 would take a core."""
    clock, pauses, count = [100.0], [], itertools.count()

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)
        clock[0] += seconds

    def look() -> dict[str, str]:
        clock[0] += 1.5
        return {"bar": str(next(count))}

    class Asked:
        async def is_disconnected(self) -> bool:
            return len(pauses) == 5

    site = Site("", Access(frozenset(), 1, "x"))
    monkeypatch.setattr(app, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(app, "asyncio", SimpleNamespace(**(vars(asyncio) | {"sleep": sleep})))
    news = [text async for text in site._list_news(Asked(), look, once=False)]  # type: ignore
    assert len(news) == 5
    assert 5 * 1.5 / (clock[0] - 100.0) == pytest.approx(0.2)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP], ids=lambda n: n.name)
def test_a_browser_that_stays_is_waited_for_by_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    """One in the terminal, or a script that does not go to the background."""
    lay_down(tmp_path)
    asked, over, opener = tmp_path / "asked", tmp_path / "over", tmp_path / "browser"
    opener.write_text(
        f'#!/bin/sh\nprintf %s "$*" > {asked}.new && mv {asked}.new {asked}\n'
        f"for i in $(seq 36000); do [ -e {over} ] && exit 0; sleep 0.1; done\n"
    )
    opener.chmod(0o700)
    monkeypatch.setenv("BROWSER", str(opener))
    before = signal.signal(number, signal.SIG_DFL)  # Under nohup it is ignored, and inherited.
    try:
        with serve(tmp_path, "job", "--open") as page:
            page.enter()
            assert page.ask("/jobs/job")[0] == 200
            wait_until(asked.exists, "browser")
            door = Path(asked.read_text().removeprefix("file://"))
            assert door.exists()
            page.process.send_signal(number)
            page.process.wait(PATIENCE_S)
            assert not door.parent.exists()
    finally:
        over.touch()
        signal.signal(number, before)


def test_servers_at_the_same_far_port_have_cookies_of_their_own(page: Page) -> None:
    """Two tunnels end at ports of one host here: the far port is the same, and no name."""
    path = page.urls["view"].partition(page.host)[2]
    near = [page.ask(path, Host=host)[1]["set-cookie"] for host in ("localhost:1", "localhost:2")]
    assert [c.partition("=")[0] for c in near] == ["perdure-1", "perdure-2"]
    known, page.cookie = page.cookie, near[0].partition(";")[0]
    try:
        assert page.ask("/jobs/job", Host="localhost:1")[0] == 200
        assert page.ask("/jobs/job", Host="localhost:2")[0] == 401
    finally:
        page.cookie = known


def test_whoever_comes_in_stays_on_this_host(page: Page) -> None:
    query = page.urls["view"].partition("?")[2]
    status, headers, _ = page.ask(f"//evil.example.com/?{query}")
    assert status == 303
    assert headers["location"].startswith("/evil")


def test_a_section_that_cannot_be_drawn_is_alone(tmp_path: Path) -> None:
    """Evidence is of any shape: other versions, and other people's plugins, write it."""
    for name, waits in (("mixed", [1, "x", [1, 2]]), ("deep", [[0, [1], "c", "op", 1]])):
        story = tell(Story())
        verdict = Verdict(
            generation=0, kind="Crash", culprit=Culprit(0), reason="why", confidence=1.0,
            first_seen_s=story.now, confirmed_s=story.now,
            evidence={"waits": waits, "stacks": {"0": "x" * 1_000_000}, "odd": {"a": [None]}},
        )  # fmt: skip
        story.write(VerdictReached(verdict=verdict))
        lay_down(tmp_path, name, story)
    with serve(tmp_path) as page:
        page.enter()
        status, _, html = page.ask("/jobs/mixed")
        assert status == 200
        assert "characters are left out" in html
        assert len(html) < 500_000
        status, _, html = page.ask("/jobs/deep")
        assert status == 200
        assert "This cannot be drawn: TypeError" in html
        assert "checkpoints/step-00000105" in html
        assert page.ask("/jobs/mixed/report.html")[0] == 200


def test_a_damaged_journal_is_shown_as_the_report_has_it(tmp_path: Path) -> None:
    for name, line in (("first", 0), ("later", 20)):
        lay_down(tmp_path, name)
        journal = tmp_path / "jobs" / name / "journal.jsonl"
        lines = journal.read_bytes().splitlines(keepends=True)
        lines[line] = b"\xff{}\n"
        journal.write_bytes(b"".join(lines))
    with serve(tmp_path) as page:
        page.enter()
        for name in ("first", "later"):
            html = page.ask(f"/jobs/{name}")[2]
            assert "The journal is damaged: 1 " in html
            job = find_here(name, str(tmp_path))
            report = tell_story(job, page=False).report
            assert f'data-wall="{report.wall_s:.2f}"' in html
            assert f"<dd>{report.goodput:.1%}</dd>" in html


def test_an_open_page_follows_its_job(tmp_path: Path) -> None:
    """A job of the same name comes in the first one's place; then there is none."""
    lay_down(tmp_path)
    with serve(tmp_path) as page:
        page.enter()
        connection = http.client.HTTPConnection("127.0.0.1", page.port, timeout=PATIENCE_S)
        connection.request(
            "GET", "/jobs/job/live", headers={"Host": page.host, "Cookie": page.cookie}
        )
        answer = connection.getresponse()

        def hear() -> tuple[str, str]:
            return tuple(answer.readline().decode().strip() for _ in range(3))[:2]  # type: ignore

        assert "ComputeHang" in hear()[1]
        story = Story()
        story.start()
        story.train(4)
        story.finish()
        lay_down(tmp_path / "new", story=story)
        for name in ("state.json", "journal.jsonl", "job.json"):
            (tmp_path / "new/jobs/job" / name).replace(tmp_path / "jobs/job" / name)
        heard = hear()
        while '"verdicts"' not in heard[1]:
            assert heard[0] == "event: sections"
            heard = hear()
        assert "ComputeHang" not in json.loads(heard[1].partition("data: ")[2])["verdicts"]
        shutil.rmtree(tmp_path / "jobs/job")
        while heard[0] != "event: trouble":
            heard = hear()
        assert "no job of this name" in heard[1]
        connection.close()


def test_of_a_thousand_curves_those_asked_for_are_drawn(tmp_path: Path) -> None:
    story = tell(Story())
    for step in (1, 2):
        values = {f"m{i}": float(i) for i in range(1000)} | {"__proto__": 1.0}
        story.step = step
        story.log(values)
    lay_down(tmp_path, story=story)
    with serve(tmp_path) as page:
        page.enter()
        assert "and 996 more" in page.ask("/jobs/job")[2]
        html = page.ask("/jobs/job?curves=M99")[2]
        assert 'data-curve="m990"' in html
        assert 'data-curve="m1"' not in html
        told = json.loads(page.ask("/jobs/job/curves?name=m7&name=__proto__")[2])
        assert set(told["curves"]) == {"m7", "__proto__"}


def test_a_second_that_is_yet_to_come_is_now(tmp_path: Path) -> None:
    lay_down(tmp_path)
    reading = JobReading(find_here("job", str(tmp_path)))
    assert reading.look_back(1e6) is reading.look()
    assert reading.look_back(4.0).report.wall_s == pytest.approx(4.0)


def test_an_instant_is_the_same_whatever_was_looked_at_before(tmp_path: Path) -> None:
    """A later one is gone on to from an earlier one; an earlier one begins anew."""
    lay_down(tmp_path)
    onwards, back = (JobReading(find_here("job", str(tmp_path))) for _ in range(2))
    end_s = int(onwards.look().report.wall_s)
    assert end_s > 3
    seen = {at_s: onwards.look_back(float(at_s)) for at_s in range(end_s)}
    for at_s in reversed(range(end_s)):
        assert back.look_back(float(at_s)) == seen[at_s]
    assert len({len(picture.series.segments) for picture in seen.values()}) > 1


def test_the_journal_of_a_job_whose_run_is_gone_is_read_once_and_told_as_by_status(
    tmp_path: Path,
) -> None:
    story = Story()
    story.start()
    story.train(5)
    story.crash(1)
    lay_down(tmp_path, "job", story)
    job = find_here("job", str(tmp_path))
    reading = JobReading(job)
    picture = reading.look()
    assert picture.snapshot == job.snapshot()
    assert reading._moment is not None
    assert reading._moment.certain.history is reading._fold.series.ledger.history
    assert picture.report.state == "lost"
    (tmp_path / "jobs/job/state.json").unlink()
    assert JobReading(job).look().snapshot == picture.snapshot


def test_what_does_not_run_is_read_once(tmp_path: Path) -> None:
    """A job whose `perdure run` is gone has no picture of its end: its journal is folded for it."""
    story = Story()
    story.start()
    story.train(20)
    lay_down(tmp_path, story=story)
    site = Site(str(tmp_path), Access(frozenset(), 1, "x"))
    job = find_here("job", str(tmp_path))
    first = site.snapshots.take(job)
    assert first.state == "lost"
    assert site.snapshots.take(job) is first
    with (tmp_path / "jobs/job/journal.jsonl").open("ab") as journal:
        journal.write(b"\n")
    assert site.snapshots.take(job) is not first


def test_a_log_is_searched_again_once_it_has_grown(tmp_path: Path) -> None:
    lay_down(tmp_path)
    log = tmp_path / "jobs/job/logs/ranks/g2/rank-0.out"
    log.write_text("a needle\n")
    reading = JobReading(find_here("job", str(tmp_path)))
    found = reading.read_log(None, "needle")
    assert [line.text for line in found] == ["a needle"]
    assert reading.read_log(None, "needle") is found
    with log.open("a") as file:
        file.write("another needle\n")
    assert len(reading.read_log(None, "needle")) == 2
