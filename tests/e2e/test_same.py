"""A rank from the warm image finds what a fresh Python finds, and its second life the same.

Each script runs under `python -u`, as torchrun runs it, in a cold rank, and in two lives of a warm
rank. The first warm life is killed. The same scripts run under torchrun itself and in two lives of
`perdure run`, warm and cold. `docs/torchrun.md` lists the differences that stay.
"""

import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from perdure.model.bus.wire import KeeperKill, KeeperSpawn, KeeperSpawned, KeeperStopped
from tests.e2e.node import Node
from tests.e2e.same_scripts import BEGIN, END, FILES, LONG, SHORT, WHERE
from tests.waiting import PATIENCE_S, wait_until

_ARGUMENT = os.fsdecode(b"caf\xe9.txt")
_QUICK = ("vendored",)
"""Scripts that each run of the tests starts under torchrun."""
_OWN = frozenset({"pid", "began_s"})
"""What no two lives have in common."""
_COLD = frozenset({"modules", "more", "hooks"})
"""perdure's own start is visible in a cold rank, and so is its hook for exceptions."""


def heed_signals() -> None:
    """Ignore no signal, also if the tests run in the background or by nohup."""
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)


def write_script(folder: Path, name: str, text: str) -> Path:
    """Write a script, and what lies beside it, to a folder of its own."""
    place = folder / name
    for path, content in FILES.get(name, {}).items():
        file = place / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content)
    place.mkdir(exist_ok=True)
    script = place / "train.py"
    script.write_text(f"{BEGIN}{WHERE}{text}\n{END}")
    return script


class Lab:
    """One keeper; each script is a few generations of it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environ = {"PYTHONHASHSEED": "3", "ODD": os.fsdecode(b"caf\xe9"), "HF_HOME": "/other"}
        self.node = Node(folder, **self.environ)
        self.generation = -1

    def write(self, name: str, text: str) -> Path:
        return write_script(self.folder, name, text)

    def run_fresh(self, script: Path) -> dict[str, Any]:
        report = script.with_name("fresh")
        process = subprocess.Popen(
            [sys.executable, "-u", str(script), _ARGUMENT],
            cwd=script.parent,
            env=self.node.launch(0, 0, 1).env | self.environ | {"REPORT": str(report)},
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            wait_until(lambda: report.exists() or process.poll() is not None, "a fresh report")
            return read(report)
        finally:
            process.kill()
            process.wait()

    def run_rank(self, script: Path, *, cold: bool) -> tuple[dict[str, Any], KeeperSpawned]:
        """Run one life, and kill it."""
        self.generation += 1
        report = script.with_name(f"report-{self.generation}")
        launch = self.node.launch(self.generation, 0, 1)
        environ = launch.env | self.environ | {"REPORT": str(report)}
        launch = msgspec.structs.replace(launch, env=carry(environ))
        order = KeeperSpawn(
            self.generation, (launch,), str(script), carried(_ARGUMENT), False, False,
            str(script.parent), cold,
        )  # fmt: skip
        self.node.ask(order)
        spawned = self.node.expect(KeeperSpawned, generation=self.generation)
        ended = self.node.paths.exit_record(self.generation, 0)
        wait_until(lambda: report.exists() or os.path.exists(ended), "a report")
        seen = read(report)
        with contextlib.suppress(ProcessLookupError):
            os.kill(spawned.pids[0], signal.SIGKILL)
        self.node.ask(KeeperKill(self.generation))
        self.node.expect(KeeperStopped, generation=self.generation)
        return seen, spawned


def carry(environ: dict[str, str]) -> dict[str, str]:
    from perdure.model.input.raw import carry_variables

    return carry_variables(environ)


def carried(*words: str) -> tuple[str, ...]:
    from perdure.model.input.raw import carry_text

    return tuple(map(carry_text, words))


def read(report: Path) -> dict[str, Any]:
    assert report.exists(), "the script has failed"
    seen: dict[str, Any] = json.loads(report.read_bytes())
    if "more" in seen:
        seen["more"] = [name for name in seen["more"] if "cython" not in str(name)]
    return seen


def describe(fresh: Any, seen: Any) -> Any:
    """Return the values of `fresh` that are missing and those that are more, or both values."""
    if not (isinstance(fresh, list) and isinstance(seen, list)):
        return fresh, seen
    return [one for one in fresh if one not in seen], [one for one in seen if one not in fresh]


@pytest.fixture(scope="module", autouse=True)
def plain() -> Iterator[None]:
    """Let no variable of the tests' own hide what a Python does without it."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("PYTHONUNBUFFERED", "PYTHONDONTWRITEBYTECODE"):
            patch.delenv(name, raising=False)
        yield


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    heed_signals()  # Both kinds of rank inherit from this process.
    lab = Lab(tmp_path_factory.mktemp("same"))
    yield lab
    lab.node.end()


CASES = [
    *(pytest.param(name, text, id=name) for name, text in SHORT.items()),
    *(pytest.param(name, text, id=name, marks=pytest.mark.long) for name, text in LONG.items()),
]


@pytest.mark.parametrize(("name", "text"), CASES)
def test_a_warm_rank_is_as_a_fresh_python(lab: Lab, name: str, text: str) -> None:
    script = lab.write(name, text)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(lab.node.paths.why_cold)  # It holds for one job, and here each script is one.
    fresh = lab.run_fresh(script)
    lab.node.wait_warm()
    first, spawned = lab.run_rank(script, cold=False)
    assert spawned.warm or " is " in spawned.why_cold
    second, _ = lab.run_rank(script, cold=False)
    warm = spawned.warm and not os.path.exists(lab.node.paths.why_cold)
    cold, _ = lab.run_rank(script, cold=True)
    for what, seen in ("first life", first), ("second life", second), ("cold", cold):
        left_out = set() if what != "cold" and warm else _COLD
        different = {
            key: describe(fresh[key], seen.get(key))
            for key in fresh.keys() - left_out - _OWN
            if seen.get(key) != fresh[key]
        }
        assert different == {}, what


class Launched:
    """A script under a launcher's own command, in one folder; its rank is killed at the end."""

    def __init__(self, script: Path, command: list[str], environ: dict[str, str]) -> None:
        self.report = script.with_name("report")
        self.output = script.with_name("output")
        self.since_s = time.time()
        """When the command began, or its rank was killed."""
        with open(self.output, "wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", *command, str(script), _ARGUMENT],
                cwd=script.parent,
                env=os.environ | environ | {"REPORT": str(self.report)},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def read_life(self) -> dict[str, Any]:
        """Return what the rank has seen, and kill it."""
        wait_until(lambda: self.report.exists() or self.process.poll() is not None, "a report")
        assert self.report.exists(), self.output.read_text()
        seen = read(self.report)
        seen["began_s"] -= self.since_s
        self.report.unlink()
        with contextlib.suppress(psutil.NoSuchProcess):
            rank = psutil.Process(seen["pid"])
            self.since_s = time.time()
            rank.kill()
            wait_until(lambda: not rank.is_running() or rank.status() == "zombie", "its end")
        return seen

    def end(self) -> None:
        self.process.terminate()
        self.process.wait(PATIENCE_S)


@pytest.fixture(scope="module")
def seconds(request: pytest.FixtureRequest) -> Iterator[dict[tuple[str, int], list[float]]]:
    """Seconds to the first line, by command and life; the medians are printed."""
    found: dict[tuple[str, int], list[float]] = {}
    yield found
    reporter = request.config.pluginmanager.getplugin("terminalreporter")
    for (how, life), values in found.items():
        what = "after the kill" if life else "from the command"
        text = f"{how}, {what}: {statistics.median(values):.2f} s, {len(values)} scripts"
        reporter.write_line(f"\nfirst line: {text}")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        pytest.param(name, text, id=name, marks=[pytest.mark.long] * (name not in _QUICK))
        for name, text in {**SHORT, **LONG}.items()
    ],
)
def test_perdure_run_is_as_torchrun(
    tmp_path: Path, name: str, text: str, seconds: dict[tuple[str, int], list[float]]
) -> None:
    """torchrun's rank has two lives as well."""
    heed_signals()
    script = write_script(tmp_path, name, text)
    environ = {"PYTHONHASHSEED": "3", "ODD": os.fsdecode(b"caf\xe9"), "HF_HOME": "/other"}
    environ |= {"OMP_NUM_THREADS": "1", "PERDURE_HOME": str(tmp_path / "home")}
    perdure = ["perdure", "run", "-n", "1", "--name"]
    commands = {
        "torchrun": ["torch.distributed.run", "--standalone", "--max-restarts", "1"],
        "warm": [*perdure, "warm"],
        "cold": [*perdure, "cold", "--cold"],
    }
    seen = {}
    for how, command in commands.items():
        launched = Launched(script, command, environ)
        try:
            seen[how] = [launched.read_life(), launched.read_life()]
            if "cold: " in launched.output.read_text():  # A reason why it cannot be warm.
                seen["made cold"] = seen.pop(how)
        finally:
            launched.end()
    fresh = seen["torchrun"][0]
    for how, lives in seen.items():
        for life, found in enumerate(lives):
            seconds.setdefault((how, life), []).append(found["began_s"])
            different = {
                key: describe(fresh[key], found.get(key))
                for key in fresh.keys() - _OWN - (_COLD if "cold" in how else set())
                if found.get(key) != fresh[key]
            }
            assert different == {}, (how, life)
