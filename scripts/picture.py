"""Writes docs/images/demo.svg: what `make demo ACTS=kills` and its report really print here.

`.venv/bin/python scripts/picture.py` runs the act and takes its output as it comes. The picture
fetches no font; it is in the one that the reader's system has.
"""

import io
import os
import subprocess
import sys
from pathlib import Path

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).resolve().parent.parent
PICTURE = ROOT / "docs" / "images" / "demo.svg"
COLUMNS = 132
FONT = "ui-monospace, Menlo, Consolas, monospace"


def run(*words: str) -> list[str]:
    """Return the lines that a program prints; fail as it does."""
    env = os.environ | {"PERDURE_HOME": str(ROOT / ".demo"), "COLUMNS": str(COLUMNS)}
    done = subprocess.run(
        [sys.executable, *words], cwd=ROOT, env=env, text=True, stdout=subprocess.PIPE, check=True
    )
    return done.stdout.rstrip().splitlines()


def cut_report(lines: list[str]) -> list[str]:
    """Return a report without its curve, and without the accounts in which there is nothing."""
    begin = next(i for i, line in enumerate(lines) if line.startswith("loss by step"))
    end = next(i for i, line in enumerate(lines) if line.startswith("Ledger"))
    return lines[:begin] + [line for line in lines[end:] if " 0.00%" not in line]


def main() -> None:
    """Run the act, print what it and the report say, and write that as a picture."""
    console = Console(record=True, width=COLUMNS, file=io.StringIO())
    told = [line for line in run("examples/demo.py", "kills") if line.startswith("  ▲")]
    parts = [
        ('$ make demo ACTS="kills"', told),
        ("$ perdure report demo", cut_report(run("-m", "perdure", "report", "demo"))),
    ]
    for command, lines in parts:
        console.print(Text(command, style="bold"))
        for line in lines:
            text = Text(line, no_wrap=True, overflow="crop")
            text.highlight_regex(r"▲ .*?(?= ·)", "bold red")
            text.highlight_regex(r"back in [\d.]+ s|training did not stop|goodput.*%", "bold green")
            text.highlight_regex(r"perdure (?:diagnose|events|report).*$", "cyan")
            text.highlight_regex(r"█.*$", "green")
            console.print(text)
        console.print()
    form = CONSOLE_SVG_FORMAT
    begin, end = form.index("@font-face"), form.index(".{unique_id}-matrix")
    form = (form[:begin] + form[end:]).replace("Fira Code, monospace", FONT)
    PICTURE.parent.mkdir(exist_ok=True)
    svg = console.export_svg(title="perdure", code_format=form, unique_id="demo")
    PICTURE.write_text("\n".join(line.rstrip() for line in svg.splitlines()) + "\n", "utf-8")
    print(f"{PICTURE.relative_to(ROOT)}: {PICTURE.stat().st_size / 1e3:.0f} kB")


if __name__ == "__main__":
    main()
