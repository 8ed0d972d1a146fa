"""What the live page costs its server, and the browser, at few and at very many ranks.

usage: python -m bench.bench_dash [RANKS ...]
       python -m bench.bench_dash --job [PAGES] [--window-s S]

For each number of RANKS (2, 1,000 and 10,000) a job with two incidents is written down as its
controller leaves it, and shown by `perdure dash`. Told are: what a look at it costs the server (the
snapshot's sections alone, and with what follows from the journal); the first look of three servers,
also where the job's `perdure run` is gone, so that the journal has to tell all of it; an instant of
the past where the job was over by a tenth, a half and nine tenths, each folded from the beginning,
and such a tenth later; the bytes of the page; and in Chromium, where there is one, the first paint,
and the milliseconds that the largest section takes to be put in place. Medians.

`--job` tells what an open page costs a job that trains beside it (`bench.open_page`).
"""

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from bench import open_page
from tests.journals import Story
from tests.pages import lay_down, serve

from perdure.cli.jobs import find_here
from perdure.cli.page.app import Site
from perdure.cli.page.door import Access
from perdure.cli.page.reading import JobReading
from perdure.dash.sections import Asked
from perdure.model.codec import decode, encode
from perdure.model.report import Snapshot

RANKS = (2, 1000, 10_000)
LOOKS = 5
_PLACE = """() => {
  let longest = 0;
  for (const body of document.querySelectorAll(".body")) {
    const html = body.innerHTML, other = html.replaceAll("#2a9d6f", "#2a9d6e") + "<i></i>";
    const name = body.id.slice(2), begun = performance.now();
    for (let i = 0; i < 10; i++) place(name, i % 2 ? html : other);
    longest = Math.max(longest, (performance.now() - begun) / 10);
  }
  return longest;
}"""


def write_job(home: Path, ranks: int) -> None:
    """Write a job of `ranks` ranks that a snapshot shows as running."""
    nproc = min(8, ranks)
    story = Story(nproc=nproc, nodes=ranks // nproc)
    story.start()
    story.train(20)
    story.crash(ranks // 2)
    story.start()
    story.train(10)
    story.hang(0)
    story.start()
    story.train(10)
    lay_down(home, "job", story)
    path = home / "jobs/job/state.json"
    snapshot: Snapshot = decode(path.read_bytes(), Snapshot)
    rows = tuple(
        msgspec.structs.replace(
            row, state="waiting" if row.rank == ranks // 2 else "running", phase="step",
            step=snapshot.step, steps_per_s=5.0, collective="allreduce #1234",
        )
        for row in snapshot.ranks
    )  # fmt: skip
    path.write_bytes(encode(msgspec.structs.replace(snapshot, ranks=rows)))


def measure(function: Callable[[], Any], looks: int = LOOKS) -> float:
    """Return the median of CPU seconds that a call takes."""
    spent = []
    for _ in range(looks):
        begun = time.process_time()
        function()
        spent.append(time.process_time() - begun)
    return statistics.median(spent)


def look_at_server(home: Path) -> dict[str, Any]:
    """Return what looks cost, in seconds, and the page's bytes."""
    site = Site(home=str(home), access=Access(frozenset(), 0, "x"))
    asked, job = Asked(), find_here("job", str(home))

    def look_first() -> None:
        begun = Site(home=str(home), access=site.access)
        begun._render(JobReading(job), asked, False)

    path = home / "jobs/job/state.json"
    lost = path.read_bytes()
    picture = msgspec.structs.replace(decode(lost, Snapshot), state="stopped")
    path.write_bytes(encode(picture))  # As a controller leaves it that has ended, or lives.
    first_told = measure(look_first, 3)
    path.write_bytes(lost)
    first = measure(look_first, 3)
    reading = JobReading(job)
    now, parts = site._render(reading, asked, False)
    size = sum(map(len, parts.values()))
    parts_of_it = iter((0.9, 0.5, 0.1, 0.2, 0.3, 0.4))

    def forget() -> None:
        site._kept.clear()
        site._render(reading, asked, False)

    def look_back() -> None:
        site._render(reading, Asked(at=next(parts_of_it) * now.report.wall_s), False)

    return {
        "first_look_s": first_told,
        "first_look_of_lost_s": first,
        "look_s": measure(lambda: site._render(reading, asked, False)),
        "look_of_all_s": measure(forget),
        "past_s": measure(look_back, 3),
        "past_going_on_s": measure(look_back, 3),
        "bytes": size,
    }


def look_at_browser(home: Path) -> dict[str, Any]:
    """Return the first paint and the longest section's time in place, in milliseconds."""
    chromium = open_page.find_chromium()
    if chromium is None:
        return {}
    from playwright.sync_api import sync_playwright

    with serve(home, "job") as page, sync_playwright() as known:
        browser = known.chromium.launch(executable_path=chromium, args=list(open_page.FLAGS))
        paints, placed = [], []
        for _ in range(LOOKS):
            tab = browser.new_page()
            tab.goto(page.urls["view"])
            tab.wait_for_selector("figure.drawn canvas")
            paints.append(
                tab.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime")
            )
            placed.append(tab.evaluate(_PLACE))
            tab.close()
        browser.close()
    return {"first_paint_ms": paints[1:], "section_ms": statistics.median(placed)}


def main() -> None:
    """Print one line of JSON a number of ranks."""
    if "--job" in sys.argv:
        open_page.main(sys.argv[sys.argv.index("--job") + 1 :])
        return
    for ranks in [int(word) for word in sys.argv[1:]] or RANKS:
        with tempfile.TemporaryDirectory(prefix="perdure-bench-") as folder:
            home = Path(folder)
            os.environ["PERDURE_HOME"] = str(home)
            write_job(home, ranks)
            found = {"ranks": ranks, **look_at_server(home), **look_at_browser(home)}
            paints = found.pop("first_paint_ms", [])
            found |= {"first_paint_ms": statistics.median(paints)} if paints else {}
            rounded = {k: round(v, 4) if isinstance(v, float) else v for k, v in found.items()}
            print(json.dumps(rounded | {"load": round(os.getloadavg()[0], 1)}), flush=True)


if __name__ == "__main__":
    main()
