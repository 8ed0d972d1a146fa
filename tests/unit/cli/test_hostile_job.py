"""Files of a job that a stranger has replaced hold no command up, and hide no other job."""

import json
import os
import resource
import socket
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import xxhash
from tests.journals import Story, render_journal
from tests.waiting import PATIENCE_S

from perdure.model.checkpoints import FileEntry, Manifest
from perdure.model.codec import encode

JOBS = {
    "bad-document": ("job.json",),
    "bad-journal": ("journal.jsonl",),
    "bad-picture": ("state.json", "endpoint.json", "parts.json", "newest.json", "run.lock"),
    "bad-rest": (
        "curves/kept", "curves/new-00000001-a.jsonl", "checkpoints/step-00000001/manifest.json",
        "logs/ranks/g0/rank-0.out", "logs/controller.log", "imports.json",
        "errors/g0-r0.json", "credentials/agent-0.json", "lighthouse.json",
    ),
}  # fmt: skip
"""Job -> what a stranger has replaced in it."""
SECRET = "root:$6$not-for-you"
MEMORY_BYTES = 4 << 30
"""Address space of a command: a file without an end would fill the machine's memory else."""

ASK_ALL = """
import sys
from perdure.cli.app import run_command
for job in sys.argv[1:]:
    for verb in ("status", "report", "logs", "events"):
        print("###", verb, job, flush=True)
        print("### code", run_command([verb, job]), flush=True)
"""


def lay_down(home: Path, name: str) -> Path:
    """Make a job that has ended."""
    story = Story(now=1_700_000_000.0)
    story.start()
    story.train(3)
    story.finish()
    folder = home / "jobs" / name
    folder.mkdir(parents=True)
    (folder / "job.json").write_bytes(encode(story.spec))
    (folder / "endpoint.json").write_text("{}")
    (folder / "journal.jsonl").write_bytes(render_journal(story.entries))
    return folder


def put(kind: str, path: Path, secret: Path) -> None:
    """Put something of this kind at `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    match kind:
        case "fifo":
            os.mkfifo(path)
        case "zero":
            path.symlink_to("/dev/zero")
        case "secret":
            path.symlink_to(secret)
        case "directory":
            path.mkdir()
        case "socket":
            with socket.socket(socket.AF_UNIX) as line:
                at = os.open(path.parent, os.O_PATH)  # A socket's path has at most 107 bytes.
                line.bind(f"/proc/self/fd/{at}/{path.name}")
                os.close(at)
        case "huge":
            with open(path, "wb") as file:
                file.truncate(1 << 42)


def limit_memory() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))


def run(home: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run Python in that home; what hangs fails the test."""
    return subprocess.run(
        [sys.executable, *words],
        env={**os.environ, "PERDURE_HOME": str(home)},
        capture_output=True,
        text=True,
        errors="replace",
        timeout=PATIENCE_S,
        preexec_fn=limit_memory,
        check=False,
    )


@pytest.mark.parametrize("kind", ["fifo", "zero", "secret", "huge"])
def test_what_lies_in_the_place_of_a_file_holds_nobody_up(tmp_path: Path, kind: str) -> None:
    """A FIFO hung `perdure status` for ever, and a link to /dev/zero filled the memory."""
    secret, home = tmp_path / "shadow", tmp_path / "home"
    secret.write_text(f"{SECRET}\n")
    lay_down(home, "whole")
    for job, names in JOBS.items():
        folder = lay_down(home, job)
        for name in names:
            if (kind, name[-4:]) != ("huge", ".out"):  # `perdure logs` streams all of a log.
                put(kind, folder / name, secret)
    listed = run(home, "-m", "perdure", "status", "--all", "--json")
    assert listed.returncode == 0, listed.stderr
    rows = {row["job"] for row in json.loads(listed.stdout)["jobs"]}
    assert rows | {"bad-journal"} == {"whole", *JOBS}  # What a job was is in its journal.
    told = run(home, "-c", ASK_ALL, "whole", *JOBS)
    codes = [line for line in told.stdout.splitlines() if line.startswith("### code")]
    assert len(codes) == 4 * (1 + len(JOBS)), told.stdout[-2000:] + told.stderr[-2000:]
    assert {line.split()[2] for line in codes} <= {"0", "2", "3"}
    bundle = tmp_path / "bundle.tar.gz"
    made = run(home, "-m", "perdure", "bundle", "bad-rest", "--out", str(bundle), "--yes")
    assert made.returncode == 0, made.stderr
    with tarfile.open(bundle) as archive:
        texts = [file.read().decode() for entry in archive if (file := archive.extractfile(entry))]
    for text in (listed.stderr, told.stdout, told.stderr, made.stderr, *texts):
        assert "Traceback" not in text
        assert SECRET not in text


@pytest.mark.parametrize("kind", ["fifo", "zero", "directory", "socket", "huge"])
@pytest.mark.parametrize("name", ["manifest.json", "weights.pt"])
def test_a_checkpoint_whose_file_is_none_holds_verify_up_no_longer(
    tmp_path: Path, kind: str, name: str
) -> None:
    """`perdure verify` waited for a FIFO for ever, and read /dev/zero until its memory was full."""
    folder = tmp_path / "step-00000001"
    entry = FileEntry(path="weights.pt", bytes=3, xxh3_128=xxhash.xxh3_128_hexdigest(b"abc"))
    put("directory", folder, folder)
    (folder / "weights.pt").write_bytes(b"abc")
    manifest = Manifest(step=1, world_size=1, files=(entry,))
    (folder / "manifest.json").write_bytes(encode(manifest))
    whole = run(tmp_path, "-m", "perdure", "verify", str(tmp_path))
    assert whole.returncode == 0, whole.stderr
    put(kind, folder / name, folder)
    done = run(tmp_path, "-m", "perdure", "verify", str(tmp_path))
    assert done.returncode == 3, done.stderr
    assert "DAMAGED" in done.stdout
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("kind", ["fifo", "zero", "directory", "socket", "huge"])
def test_a_file_that_a_person_names_is_refused_in_a_line(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "named"
    put(kind, path, path)
    program = """
import sys
from perdure.cli.app import run_command
path = sys.argv[1]
plan = "plan --devices 2 --global-batch 8 --memory 1GB"
for words in ("trace show", plan, "run --config", "run"):
    print("### code", run_command([*words.split(), path]), flush=True)
"""
    done = run(tmp_path, "-c", program, str(path))
    assert done.stdout.split("\n")[:4] == ["### code 2"] * 4, done.stderr
    assert done.stderr.count(str(path)) == 4, done.stderr
    assert "Traceback" not in done.stderr
