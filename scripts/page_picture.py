"""Writes docs/images/page.png: `perdure dash` beside a job that is harmed while it trains.

`.venv/bin/python scripts/page_picture.py` trains the GPT of `examples/gpt` on two ranks for a
minute, kills one and stops the other, and takes what Chromium shows of it.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from playwright.sync_api import sync_playwright

ROOT = Path(__file__).resolve().parent.parent
PICTURE = ROOT / "docs" / "images" / "page.png"
PERDURE = [sys.executable, "-m", "perdure"]
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-sync"]
ENDS_S = 3.0
"""How long its parts take to end, once it was stopped."""
TRAINS_S = 150.0
"""How long the job may take to come to its last step that is waited for."""


def main() -> None:
    """Run the job, harm it, take the picture, and end it."""
    with tempfile.TemporaryDirectory(prefix="perdure-picture-") as home:
        env = os.environ | {"PERDURE_HOME": home, "OMP_NUM_THREADS": "1"}
        train = ["-c", "examples/gpt/job.toml", "examples/gpt/train.py", "--steps", "100000"]

        def run(*words: str) -> str:
            done = subprocess.run(
                [*PERDURE, *words], env=env, cwd=ROOT, text=True, stdout=subprocess.PIPE, check=True
            )
            return done.stdout

        def wait(step: int) -> None:
            deadline = time.monotonic() + TRAINS_S
            while json.loads(run("status", "gpt", "--json"))["step"] < step:
                if time.monotonic() > deadline:
                    raise SystemExit(f"step {step} was not reached in {TRAINS_S:g} s")
                time.sleep(0.3)

        run("run", "--name", "gpt", "-n", "2", "--detach", *train)
        try:
            wait(120)
            run("inject", "gpt", "crash", "--rank", "1")
            wait(220)
            run("note", "gpt", "the loss goes down well")
            run("inject", "gpt", "stop", "--rank", "0")
            time.sleep(2.0)
            wait(420)
            take(env)
        finally:
            run("stop", "gpt", "--now")
            time.sleep(ENDS_S)


def take(env: dict[str, str]) -> None:
    """Take the page of the job `gpt` as it is."""
    with subprocess.Popen(
        [*PERDURE, "dash", "gpt", "--port", "0", "--operate", "--json"],
        env=env, cwd=ROOT, text=True, stdout=subprocess.PIPE,
    ) as page:  # fmt: skip
        try:
            assert page.stdout is not None
            url = json.loads(page.stdout.readline())["urls"]["operate"]
            with sync_playwright() as known:
                chromium = shutil.which("chromium") or shutil.which("chromium-browser")
                browser = known.chromium.launch(executable_path=chromium, args=FLAGS)
                tab = browser.new_page(viewport={"width": 1360, "height": 1120})
                tab.goto(url)
                tab.wait_for_selector("figure.drawn canvas")
                tab.wait_for_timeout(1500)
                PICTURE.parent.mkdir(exist_ok=True)
                tab.screenshot(path=PICTURE)
                browser.close()
        finally:
            page.terminate()
            page.wait(20)
    print(f"written: {PICTURE.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
