"""The commands of docs/profiles.md, typed as they stand there, against a box behind a real sshd."""

import http.server
import re
import shlex
import shutil
import socket
import socketserver
import subprocess
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.box import EXAMPLE, Laptop, make_boxes, needs_sshd
from tests.waiting import wait_until

pytestmark = [pytest.mark.torch, pytest.mark.serial, pytest.mark.timeout(600), needs_sshd]
PAGE = Path(__file__).resolve().parents[2] / "docs" / "profiles.md"
SHORT = ["--layers", "1", "--width", "32", "--context", "16", "--batch-size", "2", "--steps"]
PORT = "6006"


def read_section(title: str) -> tuple[dict[str, str], list[str]]:
    """Return the files that a section of the page shows, by name, and its commands in order."""
    section = PAGE.read_text().split(f"## {title}\n")[1].split("\n## ")[0]
    files: dict[str, str] = {}
    commands, name = [], ""
    for line in re.findall(r"^    (.*)$", section, re.MULTILINE):
        if line.startswith("$ cat "):
            name = line.removeprefix("$ cat ")
        elif line.startswith("perdure "):
            commands.append(line)
        else:
            files[name] = files.get(name, "") + line + "\n"
    return files, commands


@pytest.fixture
def laptop(tmp_path: Path) -> Iterator[Laptop]:
    """Return a laptop whose profile `box` has what the page's has, and this test's ssh."""
    for make in make_boxes(tmp_path):
        made = make()
        shutil.copytree(EXAMPLE, made.folder / "gpt")
        made.env["HF_TOKEN"] = "hf_secret"
        yield made


def type_line(laptop: Laptop, line: str) -> "subprocess.CompletedProcess[str]":
    return laptop.cli(*line.split()[1:])


def write_job(laptop: Laptop, steps: int) -> None:
    """Write the page's job file, with fewer steps of a smaller model."""
    files, _ = read_section("Before the meter runs for nothing")
    assert 'host = "gpu-box"' in files["~/.perdure/profiles/box.toml"]
    head, launch = files["job.toml"].split("[launch]")
    more = f'args = {[*SHORT, str(steps)]}\nenv = {{ OMP_NUM_THREADS = "1" }}\n'
    (laptop.folder / "job.toml").write_text(f"{head}{more}[launch]{launch}")


@pytest.fixture
def board() -> Iterator[int]:
    """Return the port of a page on the box, such as a TensorBoard's."""
    handler = http.server.SimpleHTTPRequestHandler
    with socketserver.TCPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.server_address[1]
        server.shutdown()
        thread.join()


def fetch(url: str) -> str:
    """Return what is served there; empty while nothing is."""
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return str(answer.read().decode())
    except OSError:
        return ""


def test_the_page_from_the_first_look_to_the_end_of_the_bill(laptop: Laptop, board: int) -> None:
    write_job(laptop, 1200)
    _, before = read_section("Before the meter runs for nothing")
    doctor, measure, dry, launch = (type_line(laptop, line) for line in before)
    assert "box" in doctor.stdout
    assert "host-dependent" not in measure.stdout.split("free_egress")[0]
    assert "DANGER" in dry.stderr
    assert "runs on box" in launch.stdout

    _, (status, logs, topology, diagnose, forward, attach) = read_section("While it runs")
    laptop.wait_step("gpt", 20)
    laptop.box.cut()  # A connection that drops proves nothing.
    assert "step" in type_line(laptop, status).stdout
    assert " loss " in type_line(laptop, logs).stdout
    assert "rank" in type_line(laptop, topology).stdout
    assert "nothing was found wrong" in type_line(laptop, diagnose).stdout
    line = type_line(laptop, forward.replace(PORT, str(board))).stdout
    with socket.create_server(("127.0.0.1", 0)) as probe:  # The box is this machine here.
        other = probe.getsockname()[1]
    line = line.replace(f"127.0.0.1:{board}:", f"127.0.0.1:{other}:", 1)
    with subprocess.Popen(shlex.split(line), env=laptop.env, cwd=laptop.folder) as opened:
        try:
            url = f"http://127.0.0.1:{other}/"
            wait_until(lambda: "Directory listing" in fetch(url), "the page")
        finally:
            opened.terminate()
    assert "step" in type_line(laptop, attach).stdout

    _, (pull, verify, show, teardown, remind) = read_section("The mandatory last phase")
    refused = laptop.cli(*teardown.split()[1:], code=4).stderr
    assert "nothing was pulled" in refused
    type_line(laptop, pull)
    assert "SHA-256 equal" in type_line(laptop, verify).stdout
    type_line(laptop, show)
    assert not Path(f"{laptop.stopped}-gpt").exists()
    type_line(laptop, teardown)
    assert Path(f"{laptop.stopped}-gpt").exists()
    assert "nothing to look after" in type_line(laptop, remind).stdout


def test_the_queue_of_the_page_runs_each_item_on_the_box_and_none_twice(laptop: Laptop) -> None:
    write_job(laptop, 30)
    files, (add, run) = read_section("A queue on the box")
    short = "args = " + ", ".join(f'"{word}"' for word in [*SHORT, "30"]).join(("[", ", "))
    (laptop.folder / "sweep.toml").write_text(files["sweep.toml"].replace("args = [", short))
    type_line(laptop, add)
    type_line(laptop, run)
    jobs = laptop.box.home / "perdure" / "state" / "jobs"
    ended = {path.parent.name for path in jobs.glob("*/journal.jsonl")}
    assert ended == {"gpt-0", "gpt-1"}
    type_line(laptop, add)
    again = laptop.cli(*run.split()[1:], "--json").stdout
    assert '"attempts": 2' not in again
