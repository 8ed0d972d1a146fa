import contextlib
import errno
import io
import os
import socket
import subprocess
import sys
import threading

import pytest
from tests.waiting import PATIENCE_S

from perdure.model.bus.wire import FromWorker, WorkerAck, WorkerEvent, WorkerHello, WorkerSignal
from perdure.model.codec import decode, encode
from perdure.model.events import CheckpointFailed, MetricsLogged, RankJoined
from perdure.model.fitting import EVENT_BYTES_MAX
from perdure.model.orders import InjectFault, SendBoundary
from perdure.worker.control import METRICS_KEPT, Control


class FakeAgent:
    """The other end of the line."""

    def __init__(self, path):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(path)
        self.listener.listen()
        self.listener.settimeout(PATIENCE_S)
        self.connection = self.lines = None

    def accept(self):
        self.hang_up()
        self.connection, _ = self.listener.accept()
        self.connection.settimeout(PATIENCE_S)
        self.lines = self.connection.makefile("rb")
        return self.read()

    def read(self):
        return decode(self.lines.readline(), FromWorker)

    def say(self, message):
        self.connection.sendall(encode(message) + b"\n")

    def hang_up(self):
        if self.connection is not None:
            self.lines.close()
            self.connection.close()
            self.connection = None

    def close(self):
        self.hang_up()
        self.listener.close()


@pytest.fixture
def agent(tmp_path):
    agent = FakeAgent(str(tmp_path / "s"))
    yield agent
    agent.close()


@pytest.fixture
def control(tmp_path):
    control = Control(str(tmp_path / "s"), WorkerHello("job", 1, 2, 3))
    yield control
    control.close()


def joined(rank):
    return RankJoined(generation=2, rank=rank)


def test_it_says_hello_first_and_then_what_was_queued(agent, control):
    control.emit(joined(7))
    control.start()
    assert agent.accept() == WorkerHello("job", 1, 2, 3)
    assert agent.read() == WorkerEvent(1, joined(7))


def test_events_are_repeated_to_the_next_agent_until_acknowledged(agent, control):
    control.start()
    agent.accept()
    for rank in range(3):
        control.emit(joined(rank))
        assert agent.read().seq == rank + 1
    agent.say(WorkerAck(1))
    agent.hang_up()
    assert isinstance(agent.accept(), WorkerHello)
    assert [agent.read().seq, agent.read().seq] == [2, 3]
    agent.say(WorkerAck(3))
    assert control.drain(300)


def test_orders_reach_their_handlers(agent, control):
    got, both = [], threading.Event()
    control.obey(got.append, SendBoundary)
    control.obey(lambda order: (got.append(order), both.set()), InjectFault)
    control.start()
    agent.accept()
    boundary = SendBoundary(
        id="b", move="prepare", kind="stop", step=9, ranks=(1,), generation=2, reason="asked"
    )
    fault = InjectFault(id="f", generation=2, rank=1, kind="stop", reason="asked")
    agent.connection.sendall(encode(boundary) + b"\n" + encode(fault) + b"\n")
    assert both.wait(PATIENCE_S)
    assert got == [boundary, fault]


def test_signals_and_queries_pass(agent, control):
    control.start()
    agent.accept()
    control.signal(15)
    assert agent.read() == WorkerSignal(15)
    control.query("b9")
    assert agent.read().id == "b9"


def test_without_an_agent_nothing_is_lost_and_nobody_waits(tmp_path, control):
    control.start()
    control.emit(joined(0))
    assert not control.drain(0.01)
    agent = FakeAgent(str(tmp_path / "s"))
    agent.accept()
    assert agent.read().seq == 1
    agent.close()


def test_nonsense_from_the_agent_is_left_out_and_the_next_order_counts(agent, control, capfd):
    """T1: hanging up would only have the agent say it again."""
    got, heard = [], threading.Event()
    control.obey(lambda order: (got.append(order), heard.set()), SendBoundary)
    control.start()
    agent.accept()
    boundary = SendBoundary(
        id="b", move="prepare", kind="stop", step=9, ranks=(1,), generation=2, reason="asked"
    )
    agent.connection.sendall(b"nonsense\n" + b"[" * 60_000 + b"\n" + encode(boundary) + b"\n")
    assert heard.wait(PATIENCE_S)
    assert got == [boundary]
    assert "may not" in capfd.readouterr().err


def test_a_forked_child_is_silent_and_lets_go_of_the_line(agent, control):
    control.start()
    agent.accept()
    release = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.close(release[1])
            control.emit(joined(9))
            control.close()
            os.read(release[0], 1)
            code = 0
        finally:
            os._exit(code)
    control.close()
    assert agent.lines.readline() == b""  # The end is seen although the child lives.
    os.close(release[1])
    os.close(release[0])
    assert os.waitpid(pid, 0)[1] == 0


def test_without_an_agent_metrics_are_bounded_and_facts_are_kept(agent, control):
    """T3: a queue that nobody empties grows by a count, and not by what was logged."""
    row = (1, {f"metric-{n}": 0.5 for n in range(1000)})
    for rank in range(600):
        control.emit(MetricsLogged(generation=2, rows=(row,)))
        control.emit(joined(rank))
    control.start()
    agent.accept()
    told = [agent.read() for _ in range(1200)]
    assert [one.seq for one in told] == list(range(1, 1201))
    assert [one.event for one in told[1::2]] == [joined(rank) for rank in range(600)]
    dropped = [one.event.dropped for one in told[::2]]
    assert dropped == [1000] * (600 - METRICS_KEPT) + [0] * METRICS_KEPT


def test_a_fact_without_measure_is_cut_before_it_is_sent(agent, control):
    """T3: a line that no agent reads whole would be lost."""
    failed = CheckpointFailed(generation=2, step=1, error="x" * 20_000_000, at_s=1.0)
    control.emit(failed)
    control.start()
    agent.accept()
    event = agent.read().event
    assert len(event.error) < EVENT_BYTES_MAX
    assert event.step == 1


def test_an_order_that_fails_costs_the_line_nothing(agent, control, capfd):
    """T1: the thread that hears orders also sends what the rank has to say."""

    def fail(order):
        raise LookupError("nobody has this")

    control.obey(fail, SendBoundary)
    control.start()
    agent.accept()
    order = SendBoundary(
        id="b", move="prepare", kind="stop", step=9, ranks=(1,), generation=2, reason="asked"
    )
    agent.say(order)
    control.emit(joined(1))
    assert agent.read() == WorkerEvent(1, joined(1))
    agent.say(WorkerAck(1))
    assert control.drain(300)
    assert "SendBoundary could not be carried out" in capfd.readouterr().err


class FullDisk(io.StringIO):
    def write(self, text):
        raise OSError(errno.ENOSPC, "No space left on device")


class Mute(Exception):
    def __repr__(self):
        raise OSError("no words for it")

    __str__ = __repr__


def test_a_standard_error_that_takes_nothing_costs_the_line_nothing(agent, control, monkeypatch):
    """T1: a script closes it, replaces it, fills its disk, and what it raises cannot be told."""

    def fail(order):
        raise Mute

    control.obey(fail, SendBoundary)
    control.start()
    agent.accept()
    order = SendBoundary(
        id="b", move="prepare", kind="stop", step=9, ranks=(1,), generation=2, reason="asked"
    )
    closed = io.StringIO()
    closed.close()
    for number, stream in enumerate((closed, FullDisk(), object(), None), 1):
        monkeypatch.setattr(sys, "stderr", stream)
        agent.connection.sendall(b"nonsense\n")
        agent.say(order)
        control.emit(joined(1))
        assert agent.read() == WorkerEvent(number, joined(1))
    monkeypatch.undo()


CLOSER = """
import os, resource, sys, threading
from perdure.model.events import RankJoined
from perdure.model.bus.wire import WorkerHello
from perdure.worker import control as line
from perdure.worker.control import Control

refused, make_pair = threading.Event(), line._make_pair

def make_noting():
    try:
        return make_pair()
    except OSError:
        refused.set()
        raise

line._make_pair = make_noting
control = Control(sys.argv[1], WorkerHello("job", 1, 2, 3))
control.start()
control.emit(RankJoined(generation=2, rank=1))
assert control.drain(300)
limits = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[3]), limits[1]))
os.closerange(3, 100)
assert sys.argv[3] != "3" or refused.wait(300)
resource.setrlimit(resource.RLIMIT_NOFILE, limits)
files = [open(f"{sys.argv[2]}/{number}", "wb+", 0) for number in range(20)]
for rank in range(2, 7):
    control.emit(RankJoined(generation=2, rank=rank))
assert control.drain(300)
control.close()
assert all(file.write(b"mine") == 4 for file in files)
"""


@pytest.mark.parametrize("allowed", [100, 3], ids=["", "none are to be had for a while"])
def test_a_script_that_closes_every_descriptor_keeps_its_files_and_its_line(
    agent, tmp_path, allowed
):
    """T2: what has the number of a socket of ours by then is the script's, perhaps a checkpoint."""
    folder = tmp_path / "files"
    folder.mkdir()
    command = [sys.executable, "-c", CLOSER, str(tmp_path / "s"), str(folder), str(allowed)]
    script = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    seen = set()
    while 6 not in seen:
        agent.accept()
        while line := agent.lines.readline():
            event = decode(line, FromWorker)
            seen.add(event.event.rank)
            agent.say(WorkerAck(event.seq))
    assert script.communicate(timeout=PATIENCE_S)[1] == ""
    assert script.returncode == 0
    assert {path.read_bytes() for path in folder.iterdir()} == {b"mine"}
