"""Files of a job that a stranger has replaced hold no command up, and hide no other job."""

import json
import os
import resource
import socket
import subprocess
import sys
import tarfile
from pathlib import Path

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

RUN_ALL = """
import json, sys
from perdure.cli.app import run_command
for words in json.loads(sys.argv[1]):
    for stream in sys.stdout, sys.stderr:
        print("###", *words, file=stream, flush=True)
    print("### code", run_command(words), flush=True)
"""
"""Runs each command of a list; one process imports perdure for all."""


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


def run_all(home: Path, *commands: list[str]) -> tuple[list[int], list[str], list[str]]:
    """Run commands in one process; return the exit code, output, and errors of each."""
    done = run(home, "-c", RUN_ALL, json.dumps(commands))
    out, errors = (f"\n{text}".split("\n### ")[1:] for text in (done.stdout, done.stderr))
    codes = [int(text.split()[1]) for text in out if text.startswith("code ")]
    told = [text for text in out if not text.startswith("code ")]
    assert len(codes) == len(told) == len(errors) == len(commands), done.stdout + done.stderr
    return codes, told, errors


KINDS = ("fifo", "zero", "secret", "huge")


def test_what_lies_in_the_place_of_a_file_holds_nobody_up(tmp_path: Path) -> None:
    """A FIFO hung `perdure status` for ever, and a link to /dev/zero filled the memory."""
    secret, home = tmp_path / "shadow", tmp_path / "home"
    secret.write_text(f"{SECRET}\n")
    lay_down(home, "whole")
    jobs = {f"{job}-{kind}": (kind, names) for job, names in JOBS.items() for kind in KINDS}
    for job, (kind, names) in jobs.items():
        folder = lay_down(home, job)
        for name in names:
            if (kind, name[-4:]) != ("huge", ".out"):  # `perdure logs` streams all of a log.
                put(kind, folder / name, secret)
    listed = run(home, "-m", "perdure", "status", "--all", "--json")
    assert listed.returncode == 0, listed.stderr
    rows = {row["job"] for row in json.loads(listed.stdout)["jobs"]}
    unknown = {f"bad-journal-{kind}" for kind in KINDS}  # What a job was is in its journal.
    assert rows | unknown == {"whole", *jobs}
    verbs = ("status", "report", "logs", "events")
    codes, *told = run_all(home, *([verb, job] for job in ("whole", *jobs) for verb in verbs))
    assert set(codes) <= {0, 2, 3}
    bundles = {f"bad-rest-{kind}": tmp_path / f"{kind}.tar.gz" for kind in KINDS}
    words = (["bundle", job, "--out", str(to), "--yes"] for job, to in bundles.items())
    codes, *made = run_all(home, *words)
    assert codes == [0] * len(KINDS), made
    texts = [listed.stderr, *(text for texts in (*told, *made) for text in texts)]
    for bundle in bundles.values():
        with tarfile.open(bundle) as archive:
            files = [file for entry in archive if (file := archive.extractfile(entry))]
            texts += [file.read().decode() for file in files]
    for text in texts:
        assert "Traceback" not in text
        assert SECRET not in text


STRANGE = ("fifo", "zero", "directory", "socket", "huge")


def test_a_checkpoint_whose_file_is_none_holds_verify_up_no_longer(tmp_path: Path) -> None:
    """`perdure verify` waited for a FIFO for ever, and read /dev/zero until its memory was full."""
    entry = FileEntry(path="weights.pt", bytes=3, xxh3_128=xxhash.xxh3_128_hexdigest(b"abc"))
    manifest = Manifest(step=1, world_size=1, files=(entry,))
    places = {"whole": tmp_path / "whole" / "step-00000001"}
    for kind in STRANGE:
        for name in ("manifest.json", "weights.pt"):
            places[f"{kind} {name}"] = tmp_path / f"{kind}-{name}" / "step-00000001"
    for what, folder in places.items():
        put("directory", folder, folder)
        (folder / "weights.pt").write_bytes(b"abc")
        (folder / "manifest.json").write_bytes(encode(manifest))
        kind, _, name = what.partition(" ")
        if name:
            put(kind, folder / name, folder)
    codes, told, errors = run_all(
        tmp_path, *(["verify", str(folder.parent)] for folder in places.values())
    )
    assert codes == [0, *[3] * (len(places) - 1)], errors
    assert ["DAMAGED" in text for text in told] == [False, *[True] * (len(places) - 1)]
    assert not [text for text in errors if "Traceback" in text]


def test_a_file_that_a_person_names_is_refused_in_a_line(tmp_path: Path) -> None:
    paths = {kind: tmp_path / f"named-{kind}" for kind in STRANGE}
    plan = "plan --devices 2 --global-batch 8 --memory 1GB"
    commands = []
    for kind, path in paths.items():
        put(kind, path, path)
        words = ("trace show", plan, "run --config", "run")
        commands += [[*one.split(), str(path)] for one in words]
    codes, _, errors = run_all(tmp_path, *commands)
    assert codes == [2] * len(commands), errors
    for words, text in zip(commands, errors, strict=True):
        assert text.partition("\n")[2].count(words[-1]) == 1, text
        assert "Traceback" not in text
