"""Run tests with the lowest version of each dependency that pyproject.toml allows.

    python -m tests.floors                   # tests of the page, the bus, torchft, and the commands
    python -m tests.floors tests/unit/worker

The environment is build/floors (2 GB). torch is the one of .venv, because `make torches` runs tests
with the lowest torch. Tools of the tests have the versions of scripts/constraints.txt.
"""

import subprocess
import sys
import tomllib
import venv
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "build/floors"
TOOLS = ("dev", "docs", "bench", "thirdparty")
"""Extras for work on perdure itself; tests run with their pinned versions."""
TESTS = (
    "tests/contract/test_dash.py", "tests/unit/dash", "tests/e2e/test_dash_browser.py",
    "tests/contract/test_bus.py", "tests/contract/test_own_cluster.py",
    "tests/contract/test_stream_on_nats.py", "tests/contract/test_certificates.py",
    "tests/contract/test_roles.py", "tests/contract/test_journal.py",
    "tests/contract/test_webhook.py", "tests/unit/adapters",
    "tests/contract/test_lighthouse.py", "tests/e2e/test_torchft.py",
    "tests/unit/worker/test_elsewhere_line.py", "tests/unit/worker/test_replica_checkpoint.py",
    "tests/unit/worker/test_replica_account.py", "tests/unit/worker/test_replica_config.py",
    "tests/unit/worker/test_replica_fence.py", "tests/unit/cli",
)  # fmt: skip


def read_requirements() -> dict[str, list[Requirement]]:
    """Return the requirements of pyproject.toml by extra; "" has those of perdure itself."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    groups = {"": project["dependencies"], **project["optional-dependencies"]}
    return {extra: [Requirement(line) for line in lines] for extra, lines in groups.items()}


def read_constraints() -> dict[str, str]:
    """Return the versions of scripts/constraints.txt by name."""
    lines = (ROOT / "scripts/constraints.txt").read_text().split()
    return {canonicalize_name(n): v for n, _, v in (line.partition("==") for line in lines)}


def list_floors() -> Iterator[tuple[str, str]]:
    """Yield name and lowest version of each dependency; empty: it has none."""
    for extra, requirements in read_requirements().items():
        for one in requirements if extra not in TOOLS else ():
            lowest = [s.version for s in one.specifier if s.operator in (">=", "==")]
            yield canonicalize_name(one.name), "".join(lowest)


def make_environment() -> Path:
    """Return the Python of build/floors; make the environment if a version has changed."""
    floors = dict(list_floors()) | {"torch": version("torch")}
    tools = {canonicalize_name(one.name) for one in read_requirements()["dev"]}
    pins = {name: pin for name, pin in read_constraints().items() if name in tools} | floors
    wanted = "".join(f"{name}=={pin}\n" for name, pin in sorted(pins.items()))
    python, made = FOLDER / "bin/python", FOLDER / "constraints.txt"
    if made.exists() and made.read_text() == wanted:
        return python
    print(f"floors: making {FOLDER.relative_to(ROOT)}", flush=True)
    if not python.exists():
        venv.create(FOLDER, with_pip=True)
    new = FOLDER / "constraints.new"
    new.write_text(wanted)
    extras = ",".join(extra for extra in read_requirements() if extra and extra not in TOOLS[1:])
    pip = [python, "-m", "pip", "install", "-q", "--disable-pip-version-check", "-c", new]
    subprocess.run([*pip, f"torch=={pins['torch']}", "numpy"], cwd=ROOT, check=True)
    subprocess.run([*pip, "-e", f".[{extras}]", "-e", "./lab"], cwd=ROOT, check=True)
    subprocess.run([python, "-m", "perdure.worker.native"], cwd=ROOT, check=True)
    new.rename(made)
    return python


def main() -> int:
    """Run pytest; return its exit code."""
    try:
        python = make_environment()
    except subprocess.CalledProcessError as error:
        print(f"floors: {error}\nhint: raise the version in pyproject.toml that pip names")
        return 3
    words = ["-q", "-m", "not long and not serial", "-n", "2", *(sys.argv[1:] or TESTS)]
    return subprocess.run([python, "-m", "pytest", *words], cwd=ROOT).returncode


if __name__ == "__main__":
    sys.exit(main())
