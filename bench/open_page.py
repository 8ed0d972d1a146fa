"""What an open page of `perdure dash` costs a job that trains: cost per event times count.

Part of `bench.bench_dash --job [PAGES] [--window-s S]`.

A job of two ranks trains, `perdure dash` shows it, and a Chromium of the lowest priority is there
throughout. In turn no page is open in it, and one, for a window each; what the first seconds of a
window bring (a first paint) is left out. Told are, of each part: the CPU milliseconds a second in
windows with the page and without; the median difference of a window with it from the two beside
it (`more`); and the A/A spread, the largest such difference of one without from the two without
beside it. The same of the ranks' steps (their work alone, in milliseconds; the script sleeps in
between, so that the machine has room for a browser, which a user has elsewhere). Of the server
also how many updates the page was sent a second, and what CPU time one costs.
"""

import argparse
import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
from bench.stamp import stamp
from tests.pages import serve

FLAGS = ("--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-sync")
RANKS = 2
SETTLE_S = 5.0
"""Of each window, so much is left out at its beginning."""
PARTS = {
    "ranks": "perdure rank",
    "agent": "perdure agent",
    "keeper": "perdure keeper",
    "controller": "perdure controller",
    "bus": "nats-server",
    "run": "perdure run",
}
"""What training waits for, or may, by what their command lines have in them."""
CHILD = """
import sys, time
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
import perdure
torch.set_num_threads(1)
run = perdure.init()
dist.init_process_group("gloo")
torch.manual_seed(0)
net = nn.Sequential(*[nn.Linear(256, 256) for _ in range(8)])
model = DistributedDataParallel(net)
opt = torch.optim.AdamW(model.parameters())
run.register(model=model, optimizer=opt)
x = torch.randn(64, 256)
with open(f"{sys.argv[1]}/{run.rank}", "w", buffering=1) as trail:
    for step in run.steps(10**9):
        begun = time.monotonic()
        opt.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        opt.step()
        run.log(loss=loss.item())
        ended = time.monotonic()
        trail.write(f"{ended} {ended - begun}\\n")
        time.sleep(0.02)
"""


def find_chromium() -> str | None:
    """Return where there is a Chromium, if there is one."""
    return shutil.which("chromium") or shutil.which("chromium-browser")


def read_cpu_s(process: psutil.Process) -> float:
    """Return the seconds that a process has been on a CPU, to the nanosecond."""
    total = 0
    for task in Path(f"/proc/{process.pid}/task").iterdir():
        total += int((task / "schedstat").read_text().split()[0])
    return total * 1e-9


def find_parts(run: psutil.Process) -> dict[str, list[psutil.Process]]:
    """Return the processes of a job by part."""
    family = [(p, " ".join(p.cmdline())) for p in (run, *run.children(recursive=True))]
    found = {part: [p for p, title in family if words in title] for part, words in PARTS.items()}
    found["run"] = [run]
    assert all(found.values()), {part: len(those) for part, those in found.items()}
    return found


class Window:
    """What was spent between two instants."""

    def __init__(self, parts: dict[str, list[psutil.Process]]) -> None:
        """Begin now."""
        self._parts, self.begun_s, self.ended_s = parts, time.monotonic(), 0.0
        self._before = self._read()
        self.ms_per_s: dict[str, float] = {}

    def _read(self) -> dict[str, float]:
        return {part: sum(map(read_cpu_s, those)) for part, those in self._parts.items()}

    def end(self) -> None:
        """End now."""
        after, self.ended_s = self._read(), time.monotonic()
        took_s = self.ended_s - self.begun_s
        self.ms_per_s = {
            part: 1e3 * (spent - self._before[part]) / took_s for part, spent in after.items()
        }

    def take_steps(self, trail: Path) -> None:
        """Take the median of the ranks' steps within, from what these have written down."""
        rows = [line.split() for path in trail.iterdir() for line in path.open()]
        inside = [
            float(took) for ended, took in (row for row in rows if len(row) == 2)
            if self.begun_s <= float(ended) <= self.ended_s
        ]  # fmt: skip
        self.ms_per_s["step_ms"] = 1e3 * statistics.median(inside)
        self.ms_per_s["steps_per_s"] = len(inside) / RANKS / (self.ended_s - self.begun_s)


def compare(alone: Sequence[float], opened: Sequence[float]) -> dict[str, float]:
    """Return medians, and by how much windows differ from those on both sides of them.

    >>> compare([1, 1, 1.5, 1], [2.0, 2.0, 2.0])
    {'without': 1.0, 'with': 2.0, 'more': 0.75, 'a_a_spread': 0.5}
    """
    more = [
        with_it - (before + after) / 2
        for with_it, (before, after) in zip(opened, itertools.pairwise(alone), strict=True)
    ]
    triples = zip(alone, alone[1:], alone[2:], strict=False)
    same = [abs(middle - (before + after) / 2) for before, middle, after in triples]
    told = (statistics.median(alone), statistics.median(opened), statistics.median(more))
    return dict(zip(("without", "with", "more", "a_a_spread"), (*told, max(same)), strict=True))


@contextmanager
def train(folder: Path) -> Iterator[psutil.Process]:
    """Yield the `perdure run` of a job that trains."""
    script, trail = folder / "child.py", folder / "trail"
    script.write_text(CHILD)
    trail.mkdir()
    words = [sys.executable, "-m", "perdure", "run", "-n", str(RANKS), "--name", "job"]
    with subprocess.Popen(
        [*words, str(script), str(trail)], cwd=folder, stdout=subprocess.DEVNULL,
        env=os.environ | {"PERDURE_HOME": str(folder)},
    ) as process:  # fmt: skip
        try:
            deadline = time.monotonic() + 120
            while sum(path.stat().st_size > 20_000 for path in trail.iterdir()) < RANKS:
                assert process.poll() is None, "the job has ended"
                assert time.monotonic() < deadline, "the job does not train"
                time.sleep(0.2)
            yield psutil.Process(process.pid)
        finally:
            process.terminate()
            process.wait(60)


def take_windows(
    parts: dict[str, list[psutil.Process]], browser: Any, url: str, pages: int, window_s: float
) -> tuple[list[Window], list[Window], list[float]]:
    """Return windows without a page and with one in turn, and updates a second of the latter."""

    def take(tab: Any = None) -> Window:
        time.sleep(SETTLE_S)
        window, before = Window(parts), tab.evaluate("window.told") if tab else 0
        time.sleep(window_s)
        window.end()
        if tab:
            updates.append((tab.evaluate("window.told") - before) / window_s)
        return window

    updates: list[float] = []
    alone, opened = [take()], []
    for _ in range(pages):
        tab = browser.new_page()
        tab.goto(url)
        tab.evaluate(
            "window.told = 0; stream.addEventListener('sections', () => { window.told++; })"
        )
        opened.append(take(tab))
        tab.close()
        alone.append(take())
    return alone, opened, updates


def main(words: Sequence[str]) -> None:
    """Print one line of JSON."""
    from playwright.sync_api import sync_playwright

    parser = argparse.ArgumentParser(prog="bench.bench_dash --job")
    parser.add_argument("pages", nargs="?", type=int, default=8)
    parser.add_argument("--window-s", type=float, default=20.0)
    asked = parser.parse_args(words)
    with (
        tempfile.TemporaryDirectory(prefix="perdure-bench-") as place,
        train(Path(place)) as run,
        serve(Path(place), "job") as page,
        sync_playwright() as known,
    ):
        browser = known.chromium.launch(executable_path=find_chromium(), args=list(FLAGS))
        for process in psutil.Process().children(recursive=True):
            if "chrom" in process.name():
                process.nice(19)  # A user's is on another machine; who is born of it inherits.
        parts = find_parts(run) | {"server": [psutil.Process(page.process.pid)]}
        alone, opened, updates = take_windows(
            parts, browser, page.urls["view"], asked.pages, asked.window_s
        )
        browser.close()
        for window in (*alone, *opened):
            window.take_steps(Path(place, "trail"))
    names = alone[0].ms_per_s
    found = {n: compare(*([w.ms_per_s[n] for w in ws] for ws in (alone, opened))) for n in names}
    rate = statistics.median(updates)
    told = {
        "updates_per_s": rate,
        "server_ms_per_update": found["server"]["more"] / rate,
        "updates_per_step": rate / found["steps_per_s"]["with"],
    }
    rounded = {name: {k: round(v, 3) for k, v in row.items()} for name, row in found.items()}
    told = {name: round(value, 3) for name, value in told.items()}
    print(json.dumps(stamp() | {"pages": asked.pages, "window_s": asked.window_s} | told | rounded))
