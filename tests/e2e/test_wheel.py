"""A wheel, built here and installed where there is no compiler: what a user of it meets."""

import json
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from tests.e2e.test_init_try import PACED

ROOT = Path(__file__).resolve().parent.parent.parent
SCRIPT = ROOT / "tests/e2e/scripts/train_counting.py"
COMPILERS = {"cc", "gcc", "g++", "c++", "clang", "clang++", "ld", "as"}

pytestmark = [pytest.mark.long, pytest.mark.slow]


def sh(*words: object, cwd: Path, env: dict[str, str] | None = None) -> str:
    done = subprocess.run(
        list(map(str, words)), cwd=cwd, env=env, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build it from a copy of what git knows, as a release would."""
    copy = tmp_path_factory.mktemp("tree")
    listed = sh("git", "ls-files", cwd=ROOT).splitlines()
    for name in listed:
        if name.startswith(("src/", "lab/", "scripts/", "README", "LICENSE", "pyproject", "docs/")):
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, copy / name)
    sh("bash", "scripts/build_wheel.sh", sys.executable, cwd=copy)
    (built,) = (copy / "dist").glob("perdure-*.whl")
    return built


@pytest.fixture(scope="module")
def place(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """Return an environment with the wheel and without a compiler, and its variables.

    What perdure depends on is taken from the environment of the tests: torch alone has 200 MB.
    """
    folder = tmp_path_factory.mktemp("place")
    venv.create(folder / "venv", with_pip=True)
    python = folder / "venv/bin/python"
    sh(python, "-m", "pip", "install", "-q", "--no-deps", "--no-index", wheel, cwd=folder)
    site = Path(
        sh(python, "-c", "import site; print(site.getsitepackages()[0])", cwd=folder).strip()
    )
    borrowed = folder / "borrowed"
    borrowed.mkdir()
    for found in Path(sysconfig.get_paths()["purelib"]).iterdir():
        if not found.name.startswith("perdure"):
            (borrowed / found.name).symlink_to(found)
    (site / "borrowed.pth").write_text(f"{borrowed}\n")
    for tool in ("nats-server", "py-spy"):
        (folder / "venv/bin" / tool).symlink_to(Path(sys.executable).parent / tool)
    tools = folder / "tools"
    tools.mkdir()
    for found in (*Path("/usr/bin").iterdir(), *Path("/bin").iterdir()):
        if found.name not in COMPILERS and not (tools / found.name).is_symlink():
            (tools / found.name).symlink_to(found)
    env = {
        name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "CC", "CXX")
    }
    env |= {
        "PATH": f"{folder}/venv/bin:{tools}",
        "PERDURE_HOME": str(folder / "home"),
        "XDG_CACHE_HOME": str(folder / "cache"),
    }
    return folder, env


def test_a_wheel_says_for_which_systems_it_is(wheel: Path) -> None:
    name, _, python, abi, system = wheel.stem.split("-")
    assert (name, python, abi) == ("perdure", "py3", "none")
    assert system.startswith("manylinux_2_")


def test_without_a_compiler_the_recorder_is_the_compiled_one(
    place: tuple[Path, dict[str, str]],
) -> None:
    folder, env = place
    assert shutil.which("gcc", path=env["PATH"]) is None
    where = sh("python", "-c", "import perdure; print(perdure.__file__)", cwd=folder, env=env)
    assert where.startswith(str(folder)), "the installed one, and not that of the tests"
    checks = json.loads(sh("perdure", "doctor", "--json", cwd=folder, env=env))["checks"]
    (recorder,) = [check for check in checks if check["name"] == "recorder"]
    assert recorder["evidence"].startswith("compiled")


def test_the_lab_is_installed_by_the_command_that_a_missing_one_names(
    place: tuple[Path, dict[str, str]],
) -> None:
    folder, env = place
    done = subprocess.run(
        ["perdure", "plan", "--help"], cwd=folder, env=env, capture_output=True, text=True,
        timeout=300,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (3, "")
    (hint,) = [line for line in done.stderr.splitlines() if line.startswith("hint: ")]
    sh(*shlex.split(hint.removeprefix("hint: ")), "--no-index", cwd=folder, env=env)
    assert "--global-batch" in sh("perdure", "plan", "--help", cwd=folder, env=env)


def test_a_job_runs_and_is_reported(place: tuple[Path, dict[str, str]]) -> None:
    folder, env = place
    (folder / "hurry").touch()
    sh("perdure", "run", "--name", "w", "-n", "2", SCRIPT, folder, cwd=folder, env=env)
    report = json.loads(sh("perdure", "report", "w", "--json", cwd=folder, env=env))
    assert (report["state"], report["ranks"]) == ("done", 2)
    assert sh("perdure", "status", cwd=folder, env=env).split()[:2] == ["job", "state"]


def test_a_script_of_the_user_is_changed_killed_and_compared(
    place: tuple[Path, dict[str, str]],
) -> None:
    folder, env = place
    (folder / "mine").mkdir()
    (folder / "mine/train.py").write_text(PACED)
    words = ("perdure", "init", "train.py", "--try", "--budget", "240", "--json")
    document = json.loads(sh(*words, cwd=folder / "mine", env=env))
    assert document["diff"].count("\n+") > 1
    assert document["trial"]["verdict"] == "equal", document["trial"]
