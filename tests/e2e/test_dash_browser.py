"""`perdure dash` in a real Chromium, beside a job that trains: what a person sees, and does."""

import json
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from perdure.cli.app import run_command
from perdure.dash.sections import BEAT_S
from perdure.dash.svg import RIGHT, WIDTH
from perdure.drill.card import KeptDrill
from perdure.service.results import keep_result
from perdure_lab.results import KeptReplay
from tests.e2e.harness import SCRIPTS, Job
from tests.journals import Story
from tests.pages import lay_down, lay_down_large, serve
from tests.results import CARD, REPLAY
from tests.waiting import PATIENCE_S, wait_until

playwright = pytest.importorskip("playwright.sync_api")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
FLAGS = (
    "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-sync",
    "--disable-component-update", "--no-first-run",
)  # fmt: skip
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium"),
]
SERIOUS = ("serious", "critical")


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with playwright.sync_playwright() as known:
        opened = known.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS))
        yield opened
        opened.close()


@pytest.fixture
def browser(chromium: Any) -> Iterator[Any]:
    """Return the browser, which forgets at the end all that a test has opened."""
    yield chromium
    for context in chromium.contexts:
        context.close()


def open_page(browser: Any, url: str, **options: Any) -> Any:
    """Return a tab at `url`; `said` has what its console says, and what it asks of other hosts."""
    tab = browser.new_context(**options).new_page()
    tab.set_default_timeout(1000 * PATIENCE_S)
    tab.said = []
    tab.on("console", lambda message: tab.said.append(message.text))
    tab.on("pageerror", lambda error: tab.said.append(str(error)))
    host = url.split("/")[2]
    tab.on("request", lambda r: r.url.split("/")[2] != host and tab.said.append(r.url))
    tab.goto(url)
    return tab


def wait(what: str, seen: Callable[[], object]) -> None:
    wait_until(seen, what)


def measure_text(tab: Any) -> float:
    """Return how many pixels high the smallest letters of the page's plots are on the screen."""
    found = tab.evaluate(
        """() => Math.min(...[...document.querySelectorAll("svg.plot text")].map((text) =>
          text.getScreenCTM().a * parseFloat(getComputedStyle(text).fontSize)))"""
    )
    return float(found)


def find_faults(tab: Any) -> list[str]:
    """Return what axe finds seriously wrong for people who do not see or point."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright")
    found = axe.Axe().run(tab).response["violations"]
    return [f"{v['id']}: {v['nodes'][0]['html'][:200]}" for v in found if v["impact"] in SERIOUS]


@pytest.mark.torch
def test_a_job_is_watched_steered_and_looked_back_at(browser: Any, tmp_path: Path) -> None:
    script = str(SCRIPTS / "train_settings.py")
    job = Job(
        tmp_path, "seen", "-n", "1", "--cold", script, "--steps", "100000", "--pace-s", "0.05",
        "--trail", str(tmp_path),
    )  # fmt: skip
    try:
        job.wait_step(5)
        with serve(tmp_path / "state", "--operate") as page:
            tab = open_page(browser, f"{page.urls['operate'].replace('/?', '/jobs/seen?')}")
            assert tab.title() == "seen: running"
            steps = tab.locator("#s-bar dd").first

            def step() -> int:
                return int(steps.inner_text())

            first = step()
            wait("later step", lambda: step() > first + 5)
            assert "100000" in tab.locator("#s-bar").inner_text(), "how many steps there are"
            _steer(tab, "pause", "all ranks stand still")
            wait("pause", lambda: tab.locator("#s-bar .state").inner_text() == "paused")
            _steer(tab, "resume", "all ranks train on")
            wait("end of the pause", lambda: "running" in tab.locator("#s-bar .state").inner_text())
            _set(tab, "lr", "0.5")
            settings = tab.locator("#s-settings table").first
            wait("setting", lambda: "0.5" in settings.inner_text())
            _set_by_keys(tab, "lr", "0.25")
            wait("setting by keys", lambda: "0.25" in settings.inner_text())
            _answer_dialogs_by_keys(tab)
            _type_before_the_first_preview(tab, "lr", "0.125")
            job.kill("perdure rank")
            wait("incident", lambda: "SIGKILL" in tab.locator("#s-incidents").inner_text())
            wait("recovery", lambda: "running" in tab.locator("#s-bar .state").inner_text())
            _look_back(tab)
            assert not tab.said, tab.said
    finally:
        job.process.terminate()
        job.wait()


@pytest.mark.torch
@pytest.mark.long
@pytest.mark.parametrize("kind", ["elastic", "torchft"])
def test_a_rank_that_dies_is_one_incident_and_the_page_says_when_it_is_over(
    browser: Any, tmp_path: Path, start: Callable[..., Job], kind: str
) -> None:
    (tmp_path / "log").mkdir()
    if kind == "elastic":
        script = (str(SCRIPTS / "elastic.py"), "--pace-s", "0.05", "--trail", str(tmp_path / "log"))
        job = start("seen", "-n", "3", *script, "--steps", "100000")
        title = "perdure rank seen g0 r1"
    else:
        pytest.importorskip("torchft")
        script = (str(SCRIPTS / "torchft_groups.py"), "1000000", str(tmp_path / "log"))
        job = start("seen", "--torchft", "--replicas", "2", "-n", "1", *script)
        title = "perdure rank seen g1 r1"
    job.wait_step(5)
    job.wait_state("running")
    with serve(tmp_path / "state") as page:
        tab = open_page(browser, page.urls["view"].replace("/?", "/jobs/seen?"))
        wait("curve", lambda: tab.locator("#s-curves svg.plot").count())
        assert tab.locator("#p-now").is_hidden()
        job.kill(title)
        incident = tab.locator("#s-incidents tr").last
        wait("incident", lambda: "SIGKILL" in incident.inner_text())
        assert "rank 1" in incident.inner_text()
        assert "give up" not in incident.inner_text(), "it is started again"
        newest = tab.locator("#s-ranks td a")
        ranks = {"elastic": ["0", "2", "4"], "torchft": ["0", "1"]}[kind]
        wait("its successor", lambda: sorted(newest.all_inner_texts()) == ranks)
        wait("recovery", lambda: tab.locator("#s-bar .state").inner_text() == "running")
        wait("end of what is wrong", lambda: tab.locator("#p-now").is_hidden())
        wait("end of its reason", lambda: not tab.locator("#s-bar .why").inner_text())
        job.cli("stop", "seen")
        assert job.wait() == 0, job.text()
        wait("end", lambda: tab.locator("#s-bar .state").inner_text() == "stopped")
        assert tab.locator("#s-ranks .trouble").count() == 0, "whoever was asked to end has ended"
        assert tab.locator("#s-nodes .trouble").count() == 0
        rows = tab.locator("#s-ranktime svg.plot").text_content()
        assert ("rank 1, 4" if kind == "elastic" else "rank 1") in rows
        assert not tab.said, tab.said


def _repeat(tab: Any, attempt: Callable[[], None]) -> None:
    """Do what a person does in a dialog, again if the job was too busy to answer."""
    said = tab.locator("#ask-said")
    for _ in range(5):
        attempt()
        wait("answer", lambda: tab.locator("#ask-said.good, #ask-said.bad").count() == 1)
        if "no answer" not in said.inner_text():
            break
        tab.locator("#ask-no").click()
    assert "good" in said.get_attribute("class"), said.inner_text()


def _steer(tab: Any, verb: str, said: str) -> None:
    def attempt() -> None:
        tab.locator(f"#s-bar button[data-verb={verb}]").click()
        wait("preview", lambda: said in tab.locator("#ask-said").inner_text())
        tab.locator("#ask-yes").click()

    _repeat(tab, attempt)
    assert verb in tab.locator("#ask-said").inner_text()
    tab.locator("#ask-no").click()


def _set(tab: Any, key: str, value: str) -> None:
    def attempt() -> None:
        tab.locator(f"#s-settings button[data-key={key}]").click()
        tab.locator("#ask-fields input").fill("nonsense")
        wait("refusal", lambda: tab.locator("#ask-said.bad").count() == 1)
        assert tab.locator("#ask-yes").is_disabled()
        tab.locator("#ask-fields input").fill(value)
        wait("preview", lambda: f"{key}={value}" in tab.locator("#ask-said").inner_text())
        tab.locator("#ask-yes").click()

    _repeat(tab, attempt)
    tab.locator("#ask-no").click()


def _set_by_keys(tab: Any, key: str, value: str) -> None:
    """Type a value and press Enter at once, before its preview has come."""

    def attempt() -> None:
        tab.locator(f"#s-settings button[data-key={key}]").focus()
        tab.keyboard.press("Enter")
        tab.keyboard.press("Control+A")
        tab.keyboard.type(value)
        tab.keyboard.press("Enter")

    _repeat(tab, attempt)
    tab.keyboard.press("Enter")
    assert tab.locator("#ask").is_hidden()


def _type_before_the_first_preview(tab: Any, key: str, value: str) -> None:
    """The preview of the value before comes late: it is not taken for that of the typed one."""
    tab.evaluate(
        """() => { window.asked = []; window.real = ask;
        ask = (act) => new Promise((done) => asked.push({ act, done })); }"""
    )

    def answer(number: int, preview: bool) -> None:
        wait("question", lambda: tab.evaluate("asked.length") > number)
        assert tab.evaluate(f"asked[{number}].act.preview") is preview
        tab.evaluate(f"asked[{number}].done({{ ok: true, text: 'well' }})")

    tab.locator(f"#s-settings button[data-key={key}]").focus()
    tab.keyboard.press("Enter")
    wait("dialog", tab.locator("#ask").is_visible)
    tab.keyboard.press("Control+A")
    tab.keyboard.type(value)
    tab.keyboard.press("Enter")
    answer(0, preview=True)
    answer(1, preview=True)
    answer(2, preview=False)
    assert tab.evaluate("asked[2].act.value") == value
    wait("answer", lambda: tab.locator("#ask-said.good").count() == 1)
    tab.keyboard.press("Enter")
    tab.evaluate("() => { ask = real; }")


def _answer_dialogs_by_keys(tab: Any) -> None:
    """In the dialog of each verb on the page, Enter does it, and Escape cancels."""
    tab.evaluate(
        """() => { window.done = []; window.real = ask; ask = async (act) => {
        if (!act.preview) done.push(act.verb); return {ok: true, text: "well"}; }; }"""
    )

    def list_done() -> list[str]:
        return list(tab.evaluate("done"))

    verbs = set(
        tab.locator("button[data-verb]").evaluate_all("all => all.map(b => b.dataset.verb)")
    )
    assert {"pause", "checkpoint", "note", "stop", "set", "undo", "cordon", "evict"} <= verbs
    for verb in sorted(verbs):
        before = list_done()
        for key in ("Escape", "Enter"):
            tab.locator(f"button[data-verb={verb}]").first.focus()
            tab.keyboard.press("Enter")
            field = tab.locator("#ask-fields input")
            if field.count():
                field.fill("1")
            wait(f"preview of {verb}", tab.locator("#ask-yes").is_enabled)
            tab.keyboard.press(key)
            if key == "Escape":
                wait(f"end of {verb}", tab.locator("#ask").is_hidden)
                assert list_done() == before
        wait(verb, lambda: list_done() == [*before, verb])  # noqa: B023
        wait("answer", lambda: tab.locator("#ask-said.good").count() == 1)
        tab.keyboard.press("Enter")
        wait(f"end of {verb}", tab.locator("#ask").is_hidden)
    tab.evaluate("() => { ask = real; }")
    for key in ("Enter", "Escape"):
        tab.locator("h1").click()
        tab.keyboard.press("?")
        wait("list of keys", tab.locator("#keys").is_visible)
        tab.keyboard.press(key)
        wait("end of the list", tab.locator("#keys").is_hidden)


def _look_back(tab: Any) -> None:
    """Move to the job's second second by the scrubber, and back by a key."""
    tab.locator("#scrubber").evaluate(
        "input => { input.value = 2; input.dispatchEvent(new Event('input', { bubbles: true })) }"
    )
    wait("past", lambda: "as it was 2.0 s" in tab.locator("#s-moment").inner_text())
    assert "SIGKILL" not in tab.locator("#s-incidents").inner_text()
    assert tab.locator("button[data-verb]").count() == 0
    tab.locator("h1").click()
    tab.keyboard.press("n")
    wait("present", lambda: "now" in tab.locator("#s-moment").inner_text())
    wait("incident of now", lambda: "SIGKILL" in tab.locator("#s-incidents").inner_text())


@pytest.mark.parametrize("scheme", ["light", pytest.param("dark", marks=pytest.mark.long)])
def test_nothing_is_seriously_wrong_for_who_does_not_see(
    browser: Any, tmp_path: Path, scheme: str
) -> None:
    lay_down(tmp_path)
    with serve(tmp_path) as page:
        tab = open_page(browser, page.urls["view"], color_scheme=scheme)
        assert find_faults(tab) == []
        tab.goto(f"http://{page.host}/jobs/job?rank=1")
        wait("curve", lambda: tab.locator("figure.drawn canvas").count())
        assert find_faults(tab) == []
        assert not tab.said, tab.said


def test_a_phone_shows_all_without_a_sideways_scroll_or_scripts_until_the_server_is_gone(
    browser: Any, tmp_path: Path
) -> None:
    lay_down(tmp_path)
    with serve(tmp_path, "job") as page:
        tab = open_page(browser, page.urls["view"], viewport={"width": 360, "height": 740})
        wait("curve", lambda: tab.locator("figure.drawn canvas").count())
        assert tab.evaluate("document.documentElement.scrollWidth") <= 360
        assert measure_text(tab) >= 10.9
        assert tab.locator("#s-incidents table").is_visible()
        assert not tab.said, tab.said

        plain = open_page(browser, page.urls["view"], java_script_enabled=False)
        assert plain.locator("#s-curves svg.plot").count() == 1
        plain.locator("#s-incidents a").first.click()
        assert "begin=" in plain.url
        assert plain.locator("#s-ranktime svg").count() == 1
        assert tab.locator("#lost").is_hidden()
    wait("word of it", lambda: "No answer" in tab.locator("#lost").inner_text())


_CUT_OFF = """() => {
  const cut = [];
  for (const text of document.querySelectorAll("svg.plot text")) {
    const [own, all] = [text, text.ownerSVGElement].map((e) => e.getBoundingClientRect());
    if (own.left < all.left - 0.5 || own.right > all.right + 0.5) cut.push(text.textContent);
  }
  return cut; }"""
_BROKEN = """() => {
  const range = document.createRange(), broken = [];
  for (const cell of document.querySelectorAll("#s-ledger td:first-child, #s-nodes .few"))
    for (const text of cell.childNodes) {
      range.selectNodeContents(text);
      const lines = new Set([...range.getClientRects()].map((box) => Math.round(box.top)));
      if (text.nodeType === 3 && lines.size > 1) broken.push(cell.textContent);
    }
  return broken; }"""


@pytest.mark.parametrize(
    ("width", "scheme"),
    [
        (375, "light"),
        pytest.param(375, "dark", marks=pytest.mark.long),
        pytest.param(1280, "light", marks=pytest.mark.long),
    ],
)
def test_a_large_job_that_is_lost_is_read_on_a_phone(
    browser: Any, tmp_path: Path, width: int, scheme: str
) -> None:
    """Names of rows and accounts are whole, and the state is told from its ground."""
    story = Story(nproc=8, nodes=140)
    story.start()
    story.train(6)
    story.crash(1119)
    story.start()
    story.train(6)
    lay_down(tmp_path, "lost", story)
    with serve(tmp_path, "lost") as page:
        screen = {"width": width, "height": 740}
        tab = open_page(browser, page.urls["view"], color_scheme=scheme, viewport=screen)
        wait("curve", lambda: tab.locator("figure.drawn canvas").count())
        state = tab.locator("#s-bar .state")
        assert state.inner_text() == "lost"
        ink, ground = state.evaluate(
            "e => [getComputedStyle(e).color, getComputedStyle(e).backgroundColor]"
        )
        assert ink != ground, "axe passes over what has the colour of its ground"
        assert find_faults(tab) == []
        assert "1104-1119" in tab.locator("#s-ranktime").inner_text()
        assert tab.evaluate(_CUT_OFF) == []
        ledger = tab.locator("#s-ledger table").inner_text()
        assert "detect" in ledger
        assert tab.evaluate(_BROKEN) == []
        heights = tab.evaluate(
            """() => [...document.querySelectorAll("#s-ledger tr:has(td)")]
              .map((row) => row.getBoundingClientRect().height).filter(Boolean)"""
        )
        assert max(sorted(heights)[:-1]) < 30, "one row has a heading, and all others a line"
        assert not tab.said, tab.said


@pytest.mark.parametrize(
    ("width", "scheme"),
    [
        (360, "light"),
        pytest.param(360, "dark", marks=pytest.mark.long),
        pytest.param(1280, "light", marks=pytest.mark.long),
        pytest.param(1280, "dark", marks=pytest.mark.long),
    ],
)
def test_results_are_read_on_a_phone_by_keys_and_by_who_does_not_see(
    browser: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, width: int, scheme: str
) -> None:
    monkeypatch.setenv("PERDURE_HOME", str(tmp_path))
    trace = tmp_path / "t.csv"
    trace.write_text("0,add,a\n0,add,b\n60000,remove,b\n120000,add,c\n600000,remove,a\n")
    assert run_command(["trace", "simulate", str(trace), "--sweep-communicator"]) == 0
    keep_result(str(tmp_path), KeptDrill(card=CARD))
    with serve(tmp_path) as page:
        screen = {"width": width, "height": 740}
        tab = open_page(browser, page.urls["view"], color_scheme=scheme, viewport=screen)
        tab.keyboard.press("r")
        tab.wait_for_url("**/results")
        links = tab.locator("#s-results a")
        for number in range(2):
            assert find_faults(tab) == []
            assert tab.evaluate("document.documentElement.scrollWidth") <= width
            links.nth(number).focus()
            tab.keyboard.press("Enter")
            tab.wait_for_url("**/results/*")
            assert find_faults(tab) == []
            assert tab.evaluate("document.documentElement.scrollWidth") <= width
            assert tab.locator("main h2").count() >= 1
            if tab.locator("svg.plot text").count():
                assert measure_text(tab) >= 10.9
            tab.keyboard.press("r")
            tab.wait_for_url("**/results")
        assert links.count() == 2
        keep_result(str(tmp_path), KeptReplay(result=REPLAY))
        wait("new result", lambda: links.count() == 3)
        assert not tab.said, tab.said


_FAIL_TO_LOAD = """() => new Promise((done) => {
  const image = new Image(); image.onerror = () => done(); image.src = "x?again"; })"""


POISON = "<img src=x onerror='window.hit=1'><script>window.hit=1</script></pre><svg onload=hit()>"


def test_what_a_rank_writes_or_a_result_says_does_nothing_on_the_page(
    browser: Any, tmp_path: Path
) -> None:
    lay_down(tmp_path)
    logs = tmp_path / "jobs/job/logs/ranks/g2"
    (logs / "rank-0.out").write_text(POISON + "\n")
    poison = f"</title>{POISON}"
    system = structs.replace(REPLAY.systems[0], system=poison)
    played = structs.replace(REPLAY, trace=poison, reference=poison, systems=(system,))
    path = keep_result(str(tmp_path), KeptReplay(result=played))
    with serve(tmp_path) as page:
        tab = open_page(browser, page.urls["view"])
        for place in ("/results", f"/results/{path.stem}"):
            tab.goto(f"http://{page.host}{place}")
            assert "onerror" in tab.locator("main").inner_text()
            assert tab.evaluate("window.hit") is None
            assert tab.locator("img").count() == 0
        tab.goto(f"http://{page.host}/jobs/job")
        wait("line", lambda: "onerror" in tab.locator("#s-log").inner_text())
        assert tab.locator("#s-log img").count() == 0
        assert not tab.said, tab.said
        tab.evaluate(_FAIL_TO_LOAD)  # After whatever the page would have failed to load before.
        assert tab.evaluate("window.hit") is None


def test_a_page_says_that_it_hears_nothing_after_two_beats_of_its_server(
    browser: Any, tmp_path: Path
) -> None:
    lay_down(tmp_path)

    def beat_often(route: Any) -> None:
        answer = route.fetch()
        told = f'data-beat-s="{BEAT_S}"'
        assert told in answer.text()
        route.fulfill(response=answer, body=answer.text().replace(told, 'data-beat-s="0.5"'))

    with serve(tmp_path, "job") as page:
        tab = open_page(browser, page.urls["view"])
        assert tab.evaluate("QUIET_MS") == 2000 * BEAT_S
        tab.route("**/jobs/job", beat_often)
        tab.reload()
        wait("curve", lambda: tab.locator("figure.drawn canvas").count())
        assert tab.evaluate("QUIET_MS") == 1000
        page.process.send_signal(signal.SIGSTOP)
        try:
            wait("word of it", lambda: "Nothing was heard" in tab.locator("#lost").inner_text())
        finally:
            page.process.send_signal(signal.SIGCONT)


@pytest.mark.long
def test_ten_thousand_ranks_are_folded_by_the_server(browser: Any, tmp_path: Path) -> None:
    """The page has as much to do as for sixty; how long that takes is a gate, `dash-morph`."""
    lay_down_large(tmp_path)
    with serve(tmp_path, "large") as page:
        tab = open_page(browser, page.urls["view"])
        wait("curve", lambda: tab.locator("figure.drawn canvas").count())
        assert "rank 4321" in tab.locator("#s-incidents").inner_text()
        assert tab.locator("#p-ranks tr").count() < 40
        html = json.loads(tab.evaluate("JSON.stringify(document.body.innerHTML.length)"))
        assert html < 400_000


def test_a_viewers_page_has_no_buttons(browser: Any, tmp_path: Path) -> None:
    lay_down(tmp_path)
    with serve(tmp_path, "--operate") as page:
        tab = open_page(browser, page.urls["view"].replace("/?", "/jobs/job?"))
        assert tab.locator("button[data-verb]").count() == 0
        assert "token" not in tab.url


def test_a_browser_that_is_opened_is_let_in_by_a_file_that_is_gone_at_the_end(
    browser: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its command line, which everybody may read, has no token."""
    lay_down(tmp_path)
    asked, opener = tmp_path / "asked", tmp_path / "browser"
    opener.write_text(f'#!/bin/sh\nprintf %s "$*" > {asked}.new && mv {asked}.new {asked}\n')
    opener.chmod(0o700)
    monkeypatch.setenv("BROWSER", str(opener))
    with serve(tmp_path, "job", "--open"):
        wait("browser", asked.exists)
        url = asked.read_text()
        door = Path(url.removeprefix("file://"))
        assert "token" not in url
        assert door.parent.stat().st_mode & 0o77 == 0
        tab = browser.new_page()
        tab.goto(url)
        wait("page", lambda: tab.title() == "job: done")
        assert "token" not in tab.url
    assert not door.parent.exists()


def test_a_page_that_stays_open_is_what_it_says(browser: Any, tmp_path: Path) -> None:
    lay_down(tmp_path)
    with serve(tmp_path, "job") as page:
        tab = open_page(browser, page.urls["view"])
        wait("curve", lambda: tab.locator("figure.drawn canvas").count())
        _scroll_by_finger(tab)
        _zoom_by_mouse(tab)
        _hide_and_show(tab)
        _insert_a_curve(tab)
        _draw_while_zoomed(tab)
        _ask_two_verbs(tab)
        before = float(tab.locator("#scrubber").input_value())
        tab.locator("h1").click()
        tab.keyboard.press("ArrowLeft")
        wait("place", lambda: float(tab.locator("#scrubber").input_value()) < before - 0.5)
        wait("past", lambda: "as it was" in tab.locator("#s-moment").inner_text())
        assert not tab.said, tab.said


def _scroll_by_finger(tab: Any) -> None:
    """A finger that scrolls the page begins no zoom which the next tap would end."""
    tab.evaluate(
        """() => { const svg = document.querySelector("#s-ranktime svg.plot");
        const send = (to, kind, clientX) =>
          to.dispatchEvent(new PointerEvent(kind, {bubbles: true, clientX}));
        send(svg, "pointerdown", 100); send(svg, "pointercancel", 100);
        send(document.body, "pointerup", 300); }"""
    )
    assert "begin" not in tab.evaluate("location.search")


def _zoom_by_mouse(tab: Any) -> None:
    """What is dragged over is what is shown then: the axis lies where the server has drawn it."""
    plot = tab.locator("#s-ranktime svg.plot")
    plot.evaluate("svg => svg.scrollIntoView({ block: 'center' })")  # Not below the scrubber.
    box, end_s = plot.bounding_box(), float(tab.locator("#scrubber").get_attribute("max"))
    left = float(plot.get_attribute("data-left"))
    axis = WIDTH - left - RIGHT
    for part, act in ((0.25, tab.mouse.down), (0.75, tab.mouse.up)):
        x = box["x"] + (left + part * axis) / WIDTH * box["width"]
        tab.mouse.move(x, box["y"] + 20)
        act()
    wait("zoom", lambda: "begin=" in tab.evaluate("location.search"))
    search = str(tab.evaluate("location.search")).removeprefix("?")
    asked = dict(pair.split("=") for pair in search.split("&"))
    assert float(asked["begin"]) == pytest.approx(0.25 * end_s, abs=0.01 * end_s)
    assert float(asked["end"]) == pytest.approx(0.75 * end_s, abs=0.01 * end_s)
    tab.evaluate("history.back()")
    wait("all of it", lambda: "begin=" not in tab.evaluate("location.search"))


def _hide_and_show(tab: Any) -> None:
    """A browser keeps six connections to a server open: a tab that nobody sees has none."""
    for hidden in (True, False):
        tab.evaluate(
            """value => { Object.defineProperty(document, "hidden", {configurable: true, value});
            document.dispatchEvent(new Event("visibilitychange")) }""",
            hidden,
        )
        assert tab.evaluate("stream === null") is hidden
    assert tab.locator("#lost").is_hidden()


def _insert_a_curve(tab: Any) -> None:
    """A curve that comes before one that is drawn leaves that where it belongs."""
    tab.evaluate(
        """async () => { const html = await (await fetch(location.href)).text();
        const doc = new DOMParser().parseFromString(html, "text/html");
        const figure = doc.querySelector("figure.curve"), other = figure.cloneNode(true);
        other.id = "curve-before"; other.dataset.curve = "before";
        figure.before(other);
        place("curves", doc.getElementById("s-curves").innerHTML); await draw(); }"""
    )
    names = tab.locator("figure:has(canvas)").evaluate_all("all => all.map(f => f.dataset.curve)")
    assert names == ["loss"]
    assert tab.evaluate("plots.size") == 1


def _draw_while_zoomed(tab: Any) -> None:
    """New values are drawn also where somebody has zoomed in, who stays there."""
    kept = tab.evaluate(
        """async () => { const plot = plots.get("loss"), real = fetchCurves;
        const until = async (fact) => {
          while (!fact()) await new Promise((done) => setTimeout(done, 20)); };
        plot.setScale("x", {min: 20, max: 40}); await until(() => plot.scales.x.min === 20);
        const before = plot.ctx.canvas.toDataURL();
        fetchCurves = async (...all) => { const told = await real(...all);
          told.curves.loss.y = told.curves.loss.y.map((y, i) => y + (i % 2)); return told; };
        await draw(); fetchCurves = real;
        await until(() => plot.ctx.canvas.toDataURL() !== before);
        return plot.scales.x.min === 20; }"""
    )
    assert kept


def _ask_two_verbs(tab: Any) -> None:
    """The late answer to a verb that was let be is not shown as that to the next one."""

    tab.evaluate(
        """() => { window.answers = {}; window.real = ask;
        ask = (act) => new Promise((done) => { answers[act.verb] = done; });
        const press = (verb) => { const b = document.createElement("button");
        b.dataset.verb = verb; steer(b); };
        press("stop"); document.getElementById("ask").close(); press("pause"); }"""
    )
    tab.evaluate("""() => answers.pause({ok: false, text: "said of pause"})""")
    wait("answer", lambda: "said of" in tab.locator("#ask-said").inner_text())
    tab.evaluate(
        """async () => { answers.stop({ok: true, text: "said of stop"}); ask = real;
        await new Promise((done) => setTimeout(done)); }"""  # All that waits for it has run.
    )
    assert tab.locator("#ask-said").inner_text() == "said of pause"
    assert tab.locator("#ask-yes").is_disabled()
    tab.locator("#ask-no").click()
