"""What three real gloo ranks write on an alarm is read by PyTorch's own analyzer."""

import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from perdure.files.private import locate_job
from perdure.model.codec import encode
from perdure.model.orders import TakeStacks
from perdure.worker.recording.recorder import TraceWriter
from tests.waiting import PATIENCE_S, wait_until

pytest.importorskip("torch")

from tests.interrupted import Ranks

pytestmark = pytest.mark.torch


@pytest.fixture
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    ranks = Ranks(tmp_path_factory.mktemp("t"))
    yield ranks
    ranks.close()


def analyze(*runs: list[str]) -> list[str]:
    """Run the analyzer with each of `runs`, in one process; return what each has printed."""
    code = (
        "import json, sys; from torch.distributed.flight_recorder.fr_trace import main\n"
        "for words in json.loads(sys.argv[1]):\n    print('###')\n    main(words)"
    )
    run = subprocess.run(
        [sys.executable, "-u", "-c", code, json.dumps(runs)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=PATIENCE_S,
    )
    assert run.returncode == 0, run.stdout
    return run.stdout.split("###\n")[1:]


def test_a_rank_that_has_recorded_nothing_yet_writes_no_trace(tmp_path: Path) -> None:
    writer = TraceWriter(
        rank=0, generation=4, directory=str(tmp_path / "traces" / "g4"),
        dumps={"gloo": lambda *_: pickle.dumps({})}, groups=dict,
    )  # fmt: skip
    writer.write()
    assert not (tmp_path / "traces").exists()


def test_living_ranks_write_traces_that_the_analyzer_reads(ranks: Ranks) -> None:
    for rank in range(3):
        assert ranks.hear(rank) == {"ready": rank}
    wait_until(lambda: ranks.count_done(2), "a collective that rank 2 has recorded")
    os.kill(ranks.processes[2].pid, signal.SIGSTOP)
    ranks.wait_held_up()
    for rank in range(3):
        ranks.lines[rank].connection.sendall(
            encode(TakeStacks(generation=4, ranks=(0, 1), reason="test")) + b"\n"
        )
    directory = Path(locate_job(str(ranks.directory), "j").traces(4), "gloo")
    both = [directory / f"rank_{rank}" for rank in (0, 1)]
    wait_until(lambda: all(path.exists() for path in both))
    wait_until(lambda: all(b"interrupt_rank.py" in path.read_bytes() for path in both))
    assert not (directory / "rank_2").exists()  # Stopped: it cannot.
    incomplete = shutil.copytree(directory, ranks.directory / "incomplete")
    os.kill(ranks.processes[2].pid, signal.SIGCONT)
    wait_until((directory / "rank_2").exists)
    first, second = analyze([str(incomplete), "--allow-incomplete-ranks"], [str(directory)])
    assert "dumps from ranks ({2})" in first
    assert "dumps from ranks" not in second
