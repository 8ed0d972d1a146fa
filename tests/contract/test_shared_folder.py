"""A real folder as arbiter: of processes that are killed, stopped and cut off, one acts."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from perdure.adapters.shared_folder import NumberedFiles, make_run_folder, open_lease
from perdure.model.errors import PlatformError
from tests.waiting import wait_until

PROGRAM = Path(__file__).parent / "folder_controller.py"


class Pair:
    """Two controllers, each with its own way to the folder."""

    def __init__(self, folder: Path) -> None:
        (folder / "shared").mkdir()
        make_run_folder(str(folder / "shared"), "run")
        self.folder = folder
        self.processes: dict[int, subprocess.Popen[bytes]] = {}
        for node in (0, 1):
            self.join(node)
            self.start(node)

    def join(self, node: int) -> None:
        (self.folder / f"way{node}").symlink_to(self.folder / "shared")

    def cut(self, node: int) -> None:
        (self.folder / f"way{node}").unlink()

    def start(self, node: int) -> None:
        command = [sys.executable, str(PROGRAM), str(self.folder / f"way{node}" / "run")]
        self.turns(node).touch()
        name = f"c{node}-{time.monotonic_ns()}"
        self.processes[node] = subprocess.Popen([*command, name, str(self.turns(node))])

    def turns(self, node: int) -> Path:
        return self.folder / f"turns{node}"

    def go_on(self, *nodes: int, turns: int = 25) -> None:
        """Wait until these nodes' loops have turned: 50 times a second on a quiet machine."""
        ends = {node: self.turns(node).stat().st_size + turns for node in nodes}
        for node, end in ends.items():
            wait_until(
                lambda node=node, end=end: self.turns(node).stat().st_size >= end,
                f"turns of node {node}",
            )

    def send(self, node: int, number: signal.Signals) -> None:
        os.kill(self.processes[node].pid, number)

    def lines(self, shared: Path | None = None) -> list[tuple[int, str]]:
        """Return (term, name) of each entry, which are numbered without a gap."""
        folder = (shared or self.folder / "shared") / "run" / "journal"
        names = sorted(int(name) for name in os.listdir(folder) if name.isdigit())
        assert names == list(range(1, len(names) + 1))
        texts = [(folder / str(name)).read_text().split("\n")[1] for name in names]
        return [(int(text.split()[0]), text.split()[1]) for text in texts]

    def wait_for(self, node: int, after: int = 0) -> int:
        """Wait until `node` acts in a term beyond `after`; return the term."""
        term, name = 0, ""

        def acts() -> bool:
            nonlocal term, name
            term, name = self.lines()[-1] if self.lines() else (0, "")
            return term > after and name.startswith(f"c{node}-")

        wait_until(acts, f"act of node {node} after term {after}")
        return term

    def end(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait()


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    pair = Pair(tmp_path)
    yield pair
    pair.end()


def test_never_two_act_whatever_happens_to_them(pair: Pair) -> None:
    wait_until(lambda: len(pair.lines()) > 5, "ticks")
    term, name = pair.lines()[-1]
    first, second = int(name[1]), 1 - int(name[1])

    pair.send(first, signal.SIGKILL)
    term = pair.wait_for(second, term)
    pair.processes[first].wait()
    pair.start(first)
    pair.go_on(first)

    pair.cut(second)
    term = pair.wait_for(first, term)
    pair.join(second)

    pair.send(first, signal.SIGSTOP)
    term = pair.wait_for(second, term)
    pair.send(first, signal.SIGCONT)
    pair.go_on(first)

    here, away = pair.folder / "shared", pair.folder / "away"
    here.rename(away)
    pair.go_on(first, second)  # A call that was under way.
    known = pair.lines(away)
    pair.go_on(first, second, turns=50)
    assert pair.lines(away) == known
    away.rename(here)
    wait_until(lambda: len(pair.lines()) > len(known), "act after the folder is back")

    pair.end()
    rows = pair.lines()
    terms = [term for term, _ in rows]
    assert terms == sorted(terms)
    assert all(len({who for t, who in rows if t == term}) == 1 for term in set(terms))


async def test_the_lease_is_compared_and_swapped(tmp_path: Path) -> None:
    with open_lease(make_run_folder(str(tmp_path), "run")) as register:
        assert await register.read() == (0, "")
        assert await register.write("a", 0) == 1
        assert await register.write("b", 0) is None
        assert await register.read() == (1, "a")
        for revision in range(1, 120):
            assert await register.write("a", revision) == revision + 1
        assert await register.write("b", 3) is None  # Dropped long ago, and taken back.
        assert await register.read() == (120, "a")
    left = sorted(int(name) for name in os.listdir(tmp_path / "run" / "lease"))
    assert left == list(range(120 - len(left) + 1, 121))
    assert len(left) <= 51


async def test_a_call_that_does_not_return_is_given_up(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "1")  # To read it waits for a writer, as of a server that is away.
    files = NumberedFiles(str(tmp_path), timeout_s=0.2, synced=False)
    with pytest.raises(PlatformError, match="does not answer"):
        await files.read([1])
    with pytest.raises(PlatformError, match="does not answer"):
        await files.list_taken()
    fd = os.open(tmp_path / "1", os.O_WRONLY)
    os.close(fd)
    files.close()


def test_a_folder_that_is_not_there_is_not_made(tmp_path: Path) -> None:
    with pytest.raises(PlatformError, match="as arbiter") as caught:
        make_run_folder(str(tmp_path / "missing"), "run")
    assert "hard links" in caught.value.hint
