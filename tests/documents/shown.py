"""Runs the commands that the documents show, and compares what they print with what is shown there.

A fenced block of `console` holds commands (`$ ...`), each with its output below it. They are run
in the order of the page, in a folder with nothing but `examples`, and with a PERDURE_HOME of its
own. What differs from run to run is masked on both sides (`mask_line`); a line that is `...` stands
for any lines, and `...` in a line for anything. What a reader does not see is said to this program
by comments:

    <!-- docs: file train.py -->      the next block is written to that file
    <!-- docs: until COMMAND -->      wait until it exits with 0
    <!-- docs: exactly -->            the next block is compared to the digit
    <!-- docs: not run: WHY -->       of the next block
    <!-- docs: indented not run: WHY -->   of all `$ ` lines of the page that are in no such block

`python -m tests.documents.shown [PAGE ...]`: all pages, or these.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bench.sweep import sweep, sweep_after_me

ROOT = Path(__file__).resolve().parent.parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
COMMAND_S_MAX = 300.0
"""How long a command may take; on a machine that nobody else uses, none takes 20 s."""
TIMED_OUT = 124
"""Exit code of a command that took longer."""

_COMMENT = re.compile(r"<!-- docs: (file|until|exactly|not run:|indented not run:) ?(.*?) ?-->")
_UNIT = r"(?:\s?(?:s|ms|us|min|h|d|%|[kMG]i?B|steps/s|slot-seconds)\b|%)"
_MASKS = [
    (re.compile(r"\x1b\[[0-9;]*m"), ""),
    (re.compile(r"(?<![\w.])~?(?:/[\w.@+-]+)+/?"), "PATH"),
    (re.compile(r"\b(?:\d+[dhm] ?)?\d+[hms]\b"), "#"),
    (re.compile(r"\b\d+ (?:s|min|h|d) ago"), "# ago"),
    (re.compile(r"(?<![=\w])\d+\.\d+(?:e[-+]?\d+)?"), "#"),
    (re.compile(rf"(?<![=\w.])\d+(?={_UNIT})"), "#"),
    (re.compile(r"\b(step|pid)( +)\d+"), r"\1\2#"),
    (re.compile(r"[1-9]\d*(?= steps? lost)"), "#"),
    (re.compile(r"#\d+"), "#"),
    (re.compile(r"(?<![=\w.])\d[\d,]+\b"), "#"),
    (re.compile(r"\b(?=[a-z]*\d)[0-9a-f]{8,}\b"), "#"),
    (re.compile(r"[▀-▟─]+"), ""),
]


@dataclass
class Step:
    """One thing to do of a page: `kind` is run, shown, file or until."""

    kind: str
    text: str
    """The command, the content of the file, or why it is only shown."""
    line: int
    expected: list[str] = field(default_factory=list)
    path: str = ""
    exactly: bool = False


def mask_line(line: str) -> str:
    """Return the line without what differs from run to run.

    Masked are times, sizes and shares with their units, decimals, numbers of two digits and more,
    steps, pids, ids, paths, bars, and how wide a gap is. What stays: words, small numbers (ranks,
    nodes, signals, restarts, exit codes), and values behind `=`.
    """
    for pattern, by in _MASKS:
        line = pattern.sub(by, line)
    return squeeze(line)


def squeeze(line: str) -> str:
    """Return the line without what cannot be seen: how wide a gap is."""
    return " ".join(line.split())


def agrees(expected: Iterable[str], printed: Iterable[str], exactly: bool = False) -> bool:
    """Return whether what was printed is what is shown, masked; blank lines at the ends aside."""
    pattern, mask = "", squeeze if exactly else mask_line
    for line in trim(expected):
        if line.strip() == "...":
            pattern += r"(?:.*\n)*?"
        else:
            pattern += r".*".join(re.escape(mask(part)) for part in line.split("...")) + r"\s*\n"
    text = "".join(f"{mask(line)}\n" for line in trim(printed))
    return re.fullmatch(pattern, text) is not None


def trim(lines: Iterable[str]) -> list[str]:
    """Return the lines without blank ones at the end."""
    kept = list(lines)
    while kept and not kept[-1].strip():
        kept.pop()
    return kept


def read_page(path: Path) -> list[Step]:
    """Return what is to be done of a page, in its order; commands that are only shown among it.

    Raises:
        ValueError: a comment for this program cannot be read, or a block has no end.
    """
    steps: list[Step] = []
    page_why = why = name = fence = language = ""
    exactly = False
    body: list[str] = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if fence:
            if line.strip() == fence:
                if name:
                    steps.append(Step("file", "\n".join(body) + "\n", number, path=name))
                elif language == "console":
                    steps += read_block(body, number - len(body), why, exactly)
                fence = why = name = ""
                exactly = False
            else:
                body.append(line)
        elif match := _COMMENT.search(line):
            kind, rest = match.groups()
            if kind == "file":
                name = rest
            elif kind == "until":
                steps.append(Step("until", rest, number))
            elif kind == "exactly":
                exactly = True
            elif kind == "not run:":
                why = rest
            else:
                page_why = rest
        elif line.startswith("<!-- docs:"):
            raise ValueError(f"{path}:{number}: {line}")
        elif line.startswith("```"):
            fence, language, body = "```", line[3:].strip(), []
        elif re.match(r" {4}\$ ", line):
            steps.append(Step("shown", page_why or "of a page that was never run", number))
    if fence:
        raise ValueError(f"{path}: a block has no end")
    return steps


def read_block(body: Sequence[str], line: int, why: str, exactly: bool) -> list[Step]:
    """Return the commands of a block of the console, to be run or, with `why`, not."""
    steps: list[Step] = []
    for number, text in enumerate(body, line):
        if text.startswith("$ "):
            kind = "shown" if why else "run"
            steps.append(Step(kind, why or text[2:], number, exactly=exactly))
        elif steps:
            steps[-1].expected.append(text)
    return steps


class Page:
    """A page being run, in a folder and with a state directory of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.code = folder, 0
        shutil.copytree(ROOT / "examples", folder / "examples")
        programs = folder / ".bin"
        programs.mkdir()
        for name, words in (("perdure", "-m perdure "), ("python", "")):
            program = programs / name
            program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {words}"$@"\n')
            program.chmod(0o755)
        self.state = folder / ".state"
        self.env = os.environ | {
            "PATH": f"{programs}:{os.environ['PATH']}",
            "PERDURE_HOME": str(self.state),
            "PYTHONPATH": f"{ROOT / 'src'}:{os.environ.get('PYTHONPATH', '')}",
            "COLUMNS": "100",
            "NO_COLOR": "1",
        }

    def run(self, command: str) -> str:
        """Return what a command prints on both streams; its exit code is the next one's `$?`."""
        with tempfile.TemporaryFile() as out:  # No pipe, which a job in the background would hold.
            try:
                self.code = subprocess.run(
                    ["bash", "-c", f"(exit {self.code})\n{command}"],
                    stdin=subprocess.DEVNULL, stdout=out, stderr=out,
                    cwd=self.folder, env=self.env, timeout=COMMAND_S_MAX,
                ).returncode  # fmt: skip
            except subprocess.TimeoutExpired:
                self.code = TIMED_OUT
                out.write(f"\n(did not end within {COMMAND_S_MAX:g} s)\n".encode())
            out.seek(0)
            text = out.read().decode(errors="replace")
        return text.replace(str(self.state), "/home/me/.perdure").replace(
            str(self.folder), "/home/me"
        )

    def do(self, step: Step) -> str:
        """Carry out one step; return what is wrong, empty where all is as shown."""
        if step.kind == "file":
            path = self.folder / step.path
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(step.text)
        elif step.kind == "until":
            deadline = time.monotonic() + COMMAND_S_MAX
            self.run(step.text)
            while self.code:
                if time.monotonic() > deadline:
                    return f"not within {COMMAND_S_MAX:g} s: {step.text}"
                time.sleep(0.1)
                self.run(step.text)
        elif step.kind == "run":
            printed = self.run(step.text).splitlines()
            if not agrees(step.expected, printed, step.exactly):
                shown = "\n".join(f"  - {line}" for line in trim(step.expected))
                found = "\n".join(f"  + {line}" for line in trim(printed))
                return f"$ {step.text}\n{shown}\n{found}"
        return ""

    def end(self) -> None:
        """End what the commands have left running."""
        sweep(f"PERDURE_HOME={self.state}".encode(), {})


def run_page(path: Path, steps: Sequence[Step]) -> list[str]:
    """Run a page; return what is wrong, up to the first wait that was in vain."""
    wrong = []
    with tempfile.TemporaryDirectory(prefix="documents-") as folder:
        page = Page(Path(folder))
        try:
            for step in steps:
                if why := page.do(step):
                    wrong.append(f"{path.relative_to(ROOT)}:{step.line}: {why}")
                    if step.kind == "until":
                        break
        finally:
            page.end()
    return wrong


def main(arguments: Sequence[str]) -> int:
    """Run pages and say what was and was not run; 1 where something is not as shown."""
    sweep_after_me()
    executed, shown, wrong = 0, Counter[str](), list[str]()
    for path in [Path(word).resolve() for word in arguments] or PAGES:
        steps = read_page(path)
        count = sum(step.kind == "run" for step in steps)
        shown.update(step.text for step in steps if step.kind == "shown")
        if count:
            print(f"docs: {path.relative_to(ROOT)}: {count} commands", flush=True)
            wrong += run_page(path, steps)
            executed += count
    for text in wrong:
        print(text)
    print(f"docs: {executed} commands executed, {len(wrong)} not as shown")
    if shown:
        print(f"docs: {shown.total()} shown and not executed:")
        for why, count in shown.most_common():
            print(f"docs:   {count:3}  {why}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
