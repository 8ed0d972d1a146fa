"""A Kaggle in a folder: it speaks as its command line does (2.2.4), and its versions really run.

    python -m tests.platforms.kaggle_service ROOT kernels push|status|output|logs ...

A version that ended by itself keeps its output, and one that was killed at its limit none: so it is
assumed here, since Kaggle does not say.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil

from tests.platforms.notebook_service import Machine, find_text

REPOSITORY = Path(__file__).resolve().parents[2]
PROGRAM = """\
#!/bin/sh
export PYTHONPATH={repository}
exec {python} -m tests.platforms.kaggle_service {root} "$@"
"""


def make_program(root: Path) -> Path:
    """Write the program `kaggle` of the service at `root`; return its folder."""
    folder = root / "bin"
    folder.mkdir(parents=True)
    text = PROGRAM.format(repository=REPOSITORY, python=sys.executable, root=root)
    (folder / "kaggle").write_text(text)
    (folder / "kaggle").chmod(0o755)
    return folder


def list_versions(root: Path) -> list[Path]:
    """Return the folders of all versions, oldest first."""
    return sorted(root.glob("v*"), key=lambda path: int(path.name[1:]))


def find_working(version: Path) -> Path:
    return version / "machine" / "kaggle" / "working"


def push(root: Path, folder: Path, limit_s: int) -> str:
    """Take a version, and start it."""
    metadata: dict[str, Any] = json.loads((folder / "kernel-metadata.json").read_text())
    owner, _, slug = metadata["id"].partition("/")
    assert owner
    if re.sub(r"[^a-z0-9]+", "-", metadata["title"].lower()) != slug:
        return "Kernel push error: Your kernel title does not resolve to the specified id."
    versions = list_versions(root)
    known = {json.loads((v / "metadata.json").read_text())["id"] for v in versions}
    unknown = [source for source in metadata["kernel_sources"] if source not in known]
    version = root / f"v{len(versions) + 1}"
    version.mkdir()
    shutil.copy(folder / metadata["code_file"], version / "notebook.ipynb")
    (version / "metadata.json").write_text(json.dumps(metadata))
    with open(version / "log", "wb") as log:
        subprocess.Popen(
            [sys.executable, "-m", "tests.platforms.kaggle_service", str(version), "run",
             str(limit_s)],
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip
    while not (version / "pid").exists():
        time.sleep(0.05)
    pushed = f"Kernel version {len(versions) + 1} successfully pushed.  Please check progress at k"
    refused = "The following are not valid kernel sources and could not be added to the kernel: "
    return f"{refused}{unknown}\n{pushed}" if unknown else pushed


def run(version: Path, limit_s: float) -> None:
    """Be the session of a version."""
    (version / ".pid").write_text(str(os.getpid()))
    (version / ".pid").rename(version / "pid")
    metadata = json.loads((version / "metadata.json").read_text())
    machine = Machine(version / "machine", "/kaggle", internet=metadata["enable_internet"])
    find_working(version).mkdir()
    before = [v for v in list_versions(version.parent) if v != version and (v / "code").exists()]
    for source in metadata["kernel_sources"] if before else ():
        target = machine.place / "input" / source.partition("/")[2]
        shutil.copytree(find_working(before[-1]), target)
    try:
        code = machine.wait(machine.execute(version / "notebook.ipynb"), limit_s)
        (version / "code").write_text(str(code))
    finally:
        machine.vanish()


def find_status(version: Path) -> tuple[str, str]:
    """Return the server's word for a version, and its message."""
    if (version / "code").exists():
        failed = (version / "code").read_text() != "0"
        return ("ERROR", "A cell has failed") if failed else ("COMPLETE", "")
    pid = int((version / "pid").read_text())
    if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        return "RUNNING", ""
    return "ERROR", "Your notebook was stopped because it exceeded the max allowed execution time"


def bring(version: Path, target: Path, pattern: str) -> str:
    """Copy a version's output to `target`."""
    if not (version / "code").exists():
        return "404 Client Error: Not Found"
    for path in find_working(version).rglob("*"):
        name = str(path.relative_to(find_working(version)))
        if path.is_file() and re.search(pattern, name):
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, target / name)
    return f"Output file downloaded to {target}"


def main(root: Path, words: list[str]) -> int:
    """Answer one command line."""
    versions = list_versions(root)
    match words:
        case ["run", limit_s]:
            run(root, float(limit_s))
        case ["kernels", "push", "-p", folder, "-t", limit_s]:
            print(push(root, Path(folder), int(limit_s)))
        case ["kernels", _, *_] if not versions:
            print("404 Client Error: Not Found for url: https://api.kaggle.com/v1/kernels")
            return 1
        case ["kernels", "status", name]:
            word, message = find_status(versions[-1])
            print(f'{name} has status "KernelWorkerStatus.{word}"')
            print(f'Failure message: "{message}"' if message else "")
        case ["kernels", "output", _, "-p", target, "-o", *more]:
            pattern = more[1] if more[:1] == ["--file-pattern"] else ""
            print(bring(versions[-1], Path(target), pattern))
        case ["kernels", "logs", _, *more]:
            while more == ["--follow"] and find_status(versions[-1])[0] == "RUNNING":
                time.sleep(0.2)
            print(find_text(versions[-1] / "machine" / "out-1.ipynb"))
        case _:
            print(f"unrecognized arguments: {words}")
            return 2
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
