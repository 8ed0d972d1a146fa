"""How long a browser takes to show new ranks' time of 10,000 ranks: within a few frames."""

import shutil
import tempfile
from pathlib import Path

from bench.gates.gate import Gate
from tests.pages import lay_down_large, serve

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run"]
_MORPH = """() => { const html = document.getElementById("s-ranktime").innerHTML;
  const other = html.replaceAll("#2a9d6f", "#2a9d6e");
  const begun = performance.now();
  for (let i = 0; i < 20; i++) place("ranktime", i % 2 ? html : other);
  return (performance.now() - begun) / 20 }"""


def measure_morph() -> float:
    """Return the milliseconds of one update of the page's largest section."""
    from playwright.sync_api import sync_playwright

    with tempfile.TemporaryDirectory() as folder, sync_playwright() as known:
        lay_down_large(Path(folder))
        browser = known.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        with serve(Path(folder), "large") as page:
            tab = browser.new_page()
            tab.goto(page.urls["view"])
            tab.wait_for_selector("figure.drawn canvas", state="attached", timeout=300_000)
            spent_ms = float(tab.evaluate(_MORPH))
        browser.close()
    return spent_ms


GATES = (Gate("dash-morph", "ms", 50, measure_morph),)
