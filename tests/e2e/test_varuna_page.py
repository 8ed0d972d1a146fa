"""docs/varuna.md: its commands, typed as they stand there, in a folder with the examples.

What is in capitals there is a name of the moment, and `...` stands for what the command before it
said. A command that another test types, or that needs another machine, is named with where.
"""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.e2e.harness import Job
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "varuna.md"
PLAN = "perdure plan examples/cost_profile.json --devices 7 --global-batch 64 --memory 16GB"
ALONE = {
    "perdure launch job.toml --on PROFILE --dry-run --out -": "#SBATCH",
    PLAN: "bubble",
    "perdure plan ... --schedule 1f1b --timeline": "forward",
    "perdure plan ... --recompute auto": "bubble",
    "perdure plan ... --timeline": "forward",
    "perdure trace show FILE": "3",
    "perdure trace simulate FILE --policy all": "varuna",
    "perdure profile -o profile.json examples/elastic_gpt.py": "blocks",
}
"""Command -> a word of what it prints."""
OF_A_JOB = {
    "perdure status JOB": "depth elastic",
    "perdure events": "RankJoined",
    "perdure status JOB --devices": "in use",
    "perdure checkpoint JOB": "gpt: ",
    "perdure verify JOB": "step",
    "perdure inject JOB slow --rank 1": "gpt: ",
    "perdure inject JOB stop --rank 1": "gpt: ",
    "perdure diagnose JOB": "rank 1",
    "perdure node notify JOB preemption --node 1 --grace 30": "gpt: ",
    "perdure report JOB": "useful",
    "perdure stop JOB": "",
}
ELSEWHERE = {
    "perdure run -n 4 examples/elastic_gpt.py": "examples are run by tests/e2e/test_elastic_*.py",
    "perdure run -n 4 examples/elastic_gpt.py --pipeline 2": "the same",
    "perdure run -n 4 examples/elastic_gpt.py --tied --pipeline 2": "the same",
    "perdure trace replay FILE --speed 10": "tests/e2e/test_replays.py",
    "perdure trace replay FILE --stages 2": "tests/e2e/test_replays.py",
    "perdure trace drive FILE job.toml": "below, by the page's own section",
    "perdure launch": "tests/e2e/test_ssh.py",
    "perdure launch job.toml --on kubernetes": "tests/platforms/k8s",
    "perdure node invite JOB": "tests/e2e/test_join.py",
    "perdure node join": "tests/e2e/test_join.py",
    "perdure plan": "as above it in the table",
    "perdure stop JOB --now": "tests/e2e/test_verbs.py",
}


def read_table() -> list[str]:
    """Return the commands of the table, in order, each once."""
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    cells = [row.split(" | ")[-1] for row in rows]
    return list(dict.fromkeys(re.findall(r"`(perdure [^`]+)`", " ".join(cells))))


def read_section() -> tuple[dict[str, str], list[str]]:
    """Return the files that the page's section shows, and its commands."""
    section = PAGE.read_text().split("## A job, driven by a trace\n")[1].split("\n## ")[0]
    text = "".join(line[4:] + "\n" for line in section.splitlines() if line.startswith("    "))
    parts = [part.split("\n", 1) for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]]
    files = {c.removeprefix("cat "): told for c, told in parts if c.startswith("cat ")}
    return files, [command for command, _ in parts if not command.startswith("cat ")]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with the examples, and the files of the page."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    for name, text in read_section()[0].items():
        (tmp_path / name).write_text(text)
    return tmp_path


def type_line(folder: Path, line: str, **names: str) -> str:
    """Return what a line of the page prints, which has to succeed."""
    for known, now in names.items():
        line = line.replace(known, now)
    done = subprocess.run(
        [sys.executable, "-m", *line.split()],
        env=dict(os.environ, PERDURE_HOME=str(folder / "state"), COLUMNS="160"),
        cwd=folder, capture_output=True, text=True, timeout=400,
    )  # fmt: skip
    assert done.returncode == 0, f"{line}: {done.returncode}\n{done.stdout}{done.stderr}"
    return done.stdout + done.stderr


def test_each_command_of_the_table_is_typed_by_a_test() -> None:
    assert set(read_table()) == {*ALONE, *OF_A_JOB, *ELSEWHERE}
    files, commands = read_section()
    assert set(files) == {"trace.json", "job.toml"}
    assert [command.split()[:3] for command in commands] == [
        ["perdure", "trace", "drive"],
        ["perdure", "report", "gpt-drive-4ced"],
    ]


@pytest.mark.long
def test_what_needs_no_job_is_said_as_the_page_has_it(folder: Path) -> None:
    for line, word in ALONE.items():
        whole = line.replace("perdure plan ...", PLAN)
        told = type_line(folder, whole, PROFILE="slurm", FILE="trace.json")
        assert word in told, f"{line}:\n{told}"
    assert json.loads((folder / "profile.json").read_text())["blocks"]


@pytest.mark.long
def test_a_job_is_looked_at_and_steered_as_the_page_has_it(folder: Path) -> None:
    words = ["--nodes", "3", "-n", "1", "examples/elastic_gpt.py", "--steps", "100000"]
    job = Job(folder, "gpt", *words)
    try:
        job.wait_step(5)
        told = {}
        for line in OF_A_JOB:
            if line == "perdure diagnose JOB":
                wait_told(job, "rank 1")
            if line == "perdure stop JOB":
                job.wait_step(job.state()["step"] + 2)
            told[line] = type_line(folder, line, JOB="gpt")
        for line, word in OF_A_JOB.items():
            assert word in told[line], f"{line}:\n{told[line]}"
        assert job.wait() == 0, job.text()[-3000:]
    finally:
        job.end()
    assert job.leftovers() == []


def wait_told(job: Job, what: str) -> None:
    """Wait until `diagnose` tells of something."""
    deadline = time.monotonic() + PATIENCE_S
    while what not in job.cli("diagnose", "gpt").stdout:
        assert time.monotonic() < deadline, job.text()[-3000:]
        time.sleep(0.5)


@pytest.mark.long
def test_a_job_is_driven_by_the_trace_of_the_page(folder: Path) -> None:
    drive, report = read_section()[1]
    told = type_line(folder, drive)
    assert "trace.json: 70.5 s played" in told
    name = re.search(r"steps/s of (gpt-drive-\w+) by nodes: 1: ", told)
    assert name is not None, told
    assert re.search(r"^perdure +[\d.]+ ", told, re.MULTILINE), told
    incidents = type_line(folder, report, **{"gpt-drive-4ced": name[1]})
    assert incidents.count("NodeLost at step") >= 2
    [line] = [line for line in incidents.splitlines() if line.startswith("unattributed")]
    assert float(line.split()[-1].rstrip("%")) < 1.0
