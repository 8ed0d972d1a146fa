"""Scripts as users write them: alone, and under an agent that the test plays."""

import contextlib
import os
import signal
import subprocess
import sys

import pytest

from perdure.adapters.rings import read_ring
from perdure.model.bus.wire import WorkerAck, WorkerEvent, WorkerHello, WorkerQuery, WorkerSignal
from perdure.model.codec import encode
from perdure.model.events import (
    BoundaryAnswered,
    BoundaryReached,
    FaultInjected,
    MetricsLogged,
    RankJoined,
)
from perdure.model.job import CheckpointConfig, JobSpec
from perdure.model.orders import InjectFault, SendBoundary
from perdure.worker.ring import RingWriter
from tests.unit.worker.test_control import FakeAgent
from tests.waiting import PATIENCE_S

FAKE_CHECKPOINTS = """
import sys, types
class Checkpointer:
    unbegun = -1
    gate_s = 0.0
    def __init__(self, **options): print("url", options["url"], flush=True)
    def register(self, name, value): print("register", name, flush=True)
    def restore(self, extra): return 3
    def save(self, step, *, reason, extra, wait=False): print("save", step, reason, flush=True)
    def begin_step(self): pass
    def check(self): pass
    def settle(self): pass
    def close(self): print("close", flush=True)
    def leave(self): pass
module = types.ModuleType("perdure.worker.checkpoint")
module.Checkpointer = Checkpointer
sys.modules["perdure.worker.checkpoint"] = module
"""

SCRIPT = """
import os, sys, time
import perdure
run = perdure.init({"lr": 0.5})
assert perdure.init() is run
class Model:
    def state_dict(self): return {}
    def load_state_dict(self, state): pass
run.register(model=Model())
hold = os.environ.get("HOLD_AT_STEP", "")
for step in run.steps(int(sys.argv[1])):
    while hold and step == int(hold) and not os.path.exists(os.environ["GO_ON"]):
        time.sleep(0.01)
    assert step == run.step
    print("step", step, flush=True)
    run.log(loss=1.0 / (step + 1), lr=run.config.lr)
    if len(sys.argv) > 2:
        time.sleep(float(sys.argv[2]))
print("end", run.step, run.joined, flush=True)
"""


def start(script, *args, **env):
    clean = {k: v for k, v in os.environ.items() if not k.startswith("PERDURE")}
    return subprocess.Popen(
        [sys.executable, "-c", script, *args],
        env=clean | env,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


class Rank:
    """A script under an agent."""

    def __init__(self, path):
        self.ring = str(path / "r.ring")
        RingWriter.create(self.ring, rank=0, generation=1).close()
        self.agent = FakeAgent(str(path / "s"))
        spec = JobSpec(script="x.py", checkpoint=CheckpointConfig(every_steps=4))
        (path / "job.json").write_bytes(encode(spec))
        self.env = {
            "PERDURE_JOB": "job", "PERDURE_RING": self.ring, "PERDURE_SOCKET": str(path / "s"),
            "PERDURE_SPEC": str(path / "job.json"), "PERDURE_CHECKPOINT_URL": str(path / "ckpt"),
            "RANK": "0", "WORLD_SIZE": "1",
        }  # fmt: skip
        self.process = None
        self.events = []
        self._go_on = path / "go-on"

    def hold(self, step):
        """Have the script wait in `step` for `go_on`."""
        self.env |= {"HOLD_AT_STEP": str(step), "GO_ON": str(self._go_on)}

    def go_on(self):
        self._go_on.touch()

    def start(self, *args):
        self.process = start(FAKE_CHECKPOINTS + SCRIPT, *args, **self.env)
        hello = self.agent.accept()
        assert hello == WorkerHello("job", 0, 1, self.process.pid)

    def read_until(self, kind):
        """Return the first message or event of `kind`; acknowledge all on the way."""
        while True:
            message = self.agent.read()
            if isinstance(message, WorkerEvent):
                self.agent.say(WorkerAck(message.seq))
                message = message.event
                self.events.append(message)
            if isinstance(message, kind):
                return message

    def order(self, move, step, kind="stop"):
        self.agent.say(
            SendBoundary(
                id="b", move=move, kind=kind, step=step, ranks=(0,), generation=1, reason="test"
            )
        )

    def finish(self):
        """Play the agent until the line ends; return what was printed."""
        with contextlib.suppress(Exception):
            while True:
                self.read_until(())
        out = self.process.communicate(timeout=PATIENCE_S)[0]
        return out.splitlines()


@pytest.fixture
def rank(tmp_path):
    rank = Rank(tmp_path)
    yield rank
    if rank.process is not None:
        rank.process.kill()
        rank.process.communicate()
    rank.agent.close()


def test_alone_the_same_script_only_counts():
    process = start(SCRIPT, "3")
    out = process.communicate(timeout=PATIENCE_S)[0].splitlines()
    assert out == ["step 0", "step 1", "step 2", "end 3 False"]
    assert process.returncode == 0


def test_importing_perdure_imports_no_torch():
    code = "import sys, perdure; perdure.init(); raise SystemExit('torch' in sys.modules)"
    process = start(code)
    process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0


def test_under_perdure_it_joins_restores_saves_and_tells(rank):
    rank.start("10")
    assert rank.read_until(RankJoined) == RankJoined(generation=1, rank=0)
    out = rank.finish()
    assert out == [
        f"url {rank.env['PERDURE_CHECKPOINT_URL']}", "register model",
        "step 3", "save 4 interval", "step 4", "step 5", "step 6", "step 7", "save 8 interval",
        "step 8", "step 9", "save 10 end", "close", "end 10 True",
    ]  # fmt: skip
    rows = {step: row for e in rank.events if isinstance(e, MetricsLogged) for step, row in e.rows}
    assert rows == {step: {"loss": 1.0 / (step + 1), "lr": 0.5} for step in range(3, 10)}
    reading = read_ring(rank.ring, 0.0)
    account = reading.account
    assert (account.start_step, account.step, reading.phase) == (3, 10, "finished")
    order = (
        account.spawned_s, account.script_s, account.init_s, account.restored_s,
        account.first_step_s, account.last_step_s, account.finished_s,
    )  # fmt: skip
    assert order == tuple(sorted(order))
    assert order[0] > 0


def test_a_stop_is_agreed_and_waits_for_its_decision(rank):
    rank.hold(5)
    rank.start("100000", "0.01")
    rank.read_until(RankJoined)
    rank.order("prepare", 10)
    answer = rank.read_until(BoundaryAnswered)
    assert (answer.ok, answer.rank) == (True, 0)
    rank.go_on()
    assert rank.read_until(WorkerQuery).id == "b"  # At step 10 it waits, and asks.
    reading = read_ring(rank.ring, 0.0)
    assert (reading.account.step, reading.phase) == (10, "boundary")
    rank.order("commit", 10)
    reached = rank.read_until(BoundaryReached)
    assert (reached.step, reached.error) == (10, "")
    printed = [line for line in rank.finish() if line != "close"]
    assert printed[-2:] == ["save 10 stop", "end 10 True"]
    assert rank.process.returncode == 0
    assert read_ring(rank.ring, 0.0).account.boundary_s > 0.1


def test_sigterm_becomes_a_request_not_an_end(rank):
    rank.start("100000", "0.01")
    while read_ring(rank.ring, 0.0).phase != "step":
        rank.process.stdout.readline()
    rank.process.send_signal(signal.SIGTERM)
    assert rank.read_until(WorkerSignal) == WorkerSignal(signal.SIGTERM)
    rank.order("prepare", 90_000)
    assert rank.read_until(BoundaryAnswered).ok
    assert rank.process.poll() is None


@pytest.mark.parametrize(
    ("kind", "args", "code"),
    [("crash", {}, -signal.SIGKILL), ("exit", {"code": 9}, 9), ("oom", {"mb": 32}, 1)],
)
def test_an_injected_fault_is_told_before_it_strikes(rank, kind, args, code):
    rank.hold(5)
    rank.start("100000", "0.01")
    rank.read_until(RankJoined)
    rank.agent.say(
        InjectFault(id="f", generation=1, rank=0, kind=kind, at_step=20, args=args, reason="test")
    )
    rank.order("prepare", 90_000)
    rank.read_until(BoundaryAnswered)  # By then the fault is known as well.
    rank.go_on()
    injected = rank.read_until(FaultInjected)
    assert (injected.kind, injected.error) == (kind, "")
    # There is no keeper here that would remove a cgroup.
    assert ("address-space limit" in injected.note) == (kind == "oom")
    assert rank.process.wait(PATIENCE_S) == code
    assert read_ring(rank.ring, 0.0).account.step == 20


def test_a_crash_now_needs_no_steps(rank):
    script = "import sys; from perdure.worker.attach import attach_rank; attach_rank();"
    rank.process = start(script + "sys.stdin.read()", **rank.env)
    rank.agent.accept()
    rank.agent.say(InjectFault(id="f", generation=1, rank=0, kind="stop", reason="test"))
    rank.read_until(FaultInjected)
    stopped = os.waitpid(rank.process.pid, os.WUNTRACED)[1]
    assert os.WIFSTOPPED(stopped)
    assert read_ring(rank.ring, 0.0).phase == "script"  # Readable although it is stopped.


def test_a_broken_ring_is_said_and_the_script_runs(tmp_path):
    process = start(SCRIPT, "1", PERDURE_RING=str(tmp_path / "none"))
    assert process.communicate(timeout=PATIENCE_S)[0].splitlines() == ["step 0", "end 1 False"]


FORKS = """
import multiprocessing, sys
import perdure
from perdure.worker import attach

run = perdure.init()
mine = attach._attachment


def child():
    mine.enter("group")
    mine.ring.commit(99, 1, 2, (1, 0, 0, 0), phase=5)
    again = perdure.init()
    print("child", attach._attachment, attach.attach_rank(), again.joined, flush=True)
    for step in again.steps(5):
        again.log(loss=1.0)


for step in run.steps(7):
    if step == 5:
        process = multiprocessing.get_context("fork").Process(target=child)
        process.start()
        process.join()
        assert process.exitcode == 0
print("end", run.step, run.joined, flush=True)
"""


def test_a_forked_child_is_nobodys_rank(rank):
    rank.process = start(FAKE_CHECKPOINTS + FORKS, **rank.env)
    rank.agent.accept()
    rank.read_until(RankJoined)
    said = rank.finish()
    assert "child None None False" in said
    assert said[-1] == "end 7 True"
    account = read_ring(rank.ring, 0.0).account
    assert (account.step, account.group_s) == (7, 0.0)
    assert [e for e in rank.events if isinstance(e, RankJoined)] == [
        RankJoined(generation=1, rank=0)
    ]
