"""Forks the ranks of elastic worlds, kills them where a scenario says so, and orders new worlds.

A process of its own, because ranks are forked from an image that has torch imported and has run
no operator. It reads scenarios from standard input, a JSON document a line, and answers each by
one line: what every rank has committed. The part of the controller is played as simply as can
be: whoever dies is left out of the next epoch.
"""

import contextlib
import faulthandler
import functools
import json
import os
import select
import shutil
import signal
import socket
import sys
import threading
import time
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch._dynamo
import torch.distributed as dist
from torch import Tensor, nn

from perdure.adapters.nats import make_shared_certificate
from perdure.control.orders import REPEAT_S
from perdure.model.codec import decode, encode
from perdure.model.events import AnyEvent, MemberReady, RankJoined, WorldBroken, WorldReformed
from perdure.model.orders import FollowWorld, ReformWorld
from perdure.plan.elastic.microbatches import plan_batches
from perdure.worker.data import MicroBatches
from perdure.worker.elastic import group as group_module
from perdure.worker.elastic import hash_tensors
from perdure.worker.elastic.communicators import gloo
from perdure.worker.elastic.communicators.split import beside
from perdure.worker.elastic.membership import Membership
from perdure.worker.elastic.state.replicated import Replica, ReplicatedState
from perdure.worker.elastic.trainer import Trainer
from perdure.worker.interrupt import shut_down_gloo
from perdure.worker.start.failure import leave_without_device
from tests.fake_communicator import FakeComm, FakeDevice, FakeGraph
from tests.waiting import PATIENCE_S

KILLED_AT = (
    "forward", "backward", "reduce", "reduced", "optimizer", "applied", "form", "connect", "bring",
)  # fmt: skip
gloo._BUILD_S = 3_600.0  # So that an order alone ends the wait for a member that has died.
FORMED_AT = ("form", "agreed", "connecting", "connect", "bring")
"""Where a world is being formed: after its members have told their standings, and before they are
connected, nothing but an order ends what the others wait for."""


class Line(Membership):
    """A membership whose controller is the process at the other end of a socket."""

    def __init__(self, me: int, joins: bool, sock: socket.socket) -> None:
        os.environ["RANK"] = str(me)
        os.environ.pop("PERDURE_MEMBER", None)
        if joins:
            os.environ["PERDURE_MEMBER"] = str(me)
        super().__init__(None)
        self.supervised = True
        self._sock = sock
        threading.Thread(target=self._listen, daemon=True).start()

    def emit(self, event: AnyEvent) -> None:
        self._sock.sendall(encode(event) + b"\n")

    def _listen(self) -> None:
        with self._sock.makefile("rb") as lines:
            for line in lines:
                order = decode(line, ReformWorld | FollowWorld)
                if isinstance(order, FollowWorld):
                    self.take_follow(order)
                else:
                    self.take(order)


HARMS = ("kill", "flap", "lose", "hang")


class Killer:
    """Ends this process at the n-th time that it comes to a place; `at` is "PLACE N".

    Of other harms it does not die there: its connections end, once (`flap`), its device has an
    error (`lose`), or nothing on the device ends any more (`hang`).
    """

    def __init__(self, at: str, harm: str, device: FakeDevice) -> None:
        place, _, number = at.partition(" ")
        assert not place or place in {*KILLED_AT, *FORMED_AT}, place
        self._place, self._left, self._harm = place, int(number or 0), harm
        self._device = device
        self.takes_along: Path | None = None
        """Memory of a node that is lost with it."""

    def pass_by(self, place: str) -> None:
        if place and place == self._place:
            self._left -= 1
            if self._left < 0 and self._harm == "kill":
                if self.takes_along is not None:
                    shutil.rmtree(self.takes_along, ignore_errors=True)
                if place == "connecting":  # In the middle of it, in another thread.
                    delay_s = 0.0005 * (os.getpid() % 8)
                    threading.Timer(delay_s, os.kill, (os.getpid(), signal.SIGKILL)).start()
                    return
                os.kill(os.getpid(), signal.SIGKILL)
            if self._left == -1:
                match self._harm:
                    case "flap":
                        shut_down_gloo()
                    case "lose":
                        self._device.error = "an illegal memory access was encountered"
                    case "hang":
                        self._device.hangs = True

    def wrap(self, owner: Any, name: str, before: str = "", after: str = "") -> None:
        inner = getattr(owner, name)

        def outer(*args: Any, **kwargs: Any) -> Any:
            self.pass_by(before)
            done = inner(*args, **kwargs)
            self.pass_by(after)
            return done

        setattr(owner, name, outer)


class Numbers:
    """97 samples of which the target is a function of the input."""

    def __len__(self) -> int:
        return 97

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x = torch.randn(16, generator=torch.Generator().manual_seed(index))
        return x, x.sum().view(1)


def list_indices(data: MicroBatches, step: int, number: int) -> list[int]:
    return [data._order[at] for at in data._plan.positions(step, number)]


def keep_pace(scenario: dict[str, Any]) -> None:
    """Take the scenario's time; while somebody follows, up to a second, for a busy machine.

    Who follows makes the steps of the world: it would wait for ever for one that waits for it.
    """
    time.sleep(scenario.get("pace_s", 0.0))
    deadline_s = time.monotonic() + (1.0 if scenario.get("follow") else 0.0)
    while time.monotonic() < deadline_s and not find_followed(scenario).exists():
        time.sleep(0.02)


def find_followed(scenario: dict[str, Any]) -> Path:
    """Return the file that is there once nobody follows any more."""
    return Path(scenario["out"].format("followed")).with_suffix(".there")


def run_rank(scenario: dict[str, Any], me: int, joins: bool, sock: socket.socket) -> None:
    """Train as member `me`, and write what was committed to its file."""
    faulthandler.register(signal.SIGUSR1)
    torch.set_num_threads(1)
    os.environ["PERDURE_NODE"] = str(me % scenario.get("nodes", 1))
    device = FakeDevice(**scenario.get("device", {}))
    harm = next((one for one in HARMS if str(me) in scenario.get(one, {})), "kill")
    killer = Killer(scenario.get(harm, {}).get(str(me), ""), harm, device)
    killer.takes_along = find_memory(scenario, me) if scenario.get("nodes", 1) > 1 else None
    torch.manual_seed(1000 + me)
    width = scenario.get("width", 64)
    model = make_model(scenario, width)
    plan = plan_batches(scenario["batch"], scenario["micro_batch"])
    data = MicroBatches(Numbers(), plan, seed=3, shuffle=True)
    used: list[list[int]] = []

    def compute(step: int, number: int) -> Tensor:
        killer.pass_by("forward")
        inputs, targets = load(step, number)
        replay_captured()
        outputs = replica.model(inputs)
        outputs.register_hook(lambda grad: killer.pass_by("backward"))
        return nn.functional.mse_loss(outputs, targets)

    def load(step: int, number: int) -> tuple[Tensor, Tensor]:
        used.append([step, number, *list_indices(data, step, number)])
        keep_pace(scenario)
        inputs, targets = data.load(step, number)
        return inputs, targets

    line = Line(me, joins, sock)
    connect = make_connect(scenario, device)
    if "stages" in scenario:
        replica, trainer = make_stages(scenario, model, load, killer, line, connect)
    else:
        replica, trainer = make_trainer(scenario, model, compute, line, connect)
    killer.wrap(group_module.Group, "wait", "reduce", "reduced")
    killer.wrap(replica, "update", "optimizer", "applied")
    killer.wrap(trainer, "_form", "form")
    killer.wrap(sys.modules[type(trainer).__module__], "exchange_progress", "", "agreed")
    killer.wrap(gloo, "connect", "connecting")
    killer.wrap(FakeDevice, "connect", "connecting")
    killer.wrap(trainer, "_bring_together", "connect", "bring")
    if "capture" in scenario:
        capture_worlds(trainer, registered=str(me) not in scenario["capture"])
    with open(scenario["out"].format(me), "w") as out:
        for step in trainer.steps(scenario["steps"]):
            row = {
                "step": step.step,
                "losses": [loss.hex() for loss in step.losses],
                "world": step.world,
                "epoch": step.epoch,
                "at": time.monotonic(),
                "used": used[:],
                # Of the newest state: a rank that rolls forward yields two steps at once.
                "hash": hash_state(replica),
                "tied": hash_tied(replica),
                "hash_of": trainer.applied,
                "shard": name_part(replica),
                "blocks": getattr(replica, "mine", ()),
                "sizes": getattr(replica, "sizes", ()),
                "shape": trainer.state.work.layout.shape if "stages" in scenario else "",
            }
            used.clear()
            out.write(json.dumps(row) + "\n")
            out.flush()


def make_model(scenario: dict[str, Any], width: int) -> nn.Sequential:
    """Return the model; `tied`: its ends share a matrix, and two blocks between all they have."""
    first, tied = nn.Linear(16, width), scenario.get("tied", False)
    layers = [nn.Linear(width, width) for _ in range(scenario.get("layers", 1))]
    if tied:
        layers = [*layers, layers[0]]
    last = Back(first.weight) if tied else nn.Linear(width, 1)
    dropout = nn.Dropout(scenario.get("dropout", 0.1))
    return nn.Sequential(first, dropout, nn.ReLU(), *layers, nn.ReLU(), last)


class Back(nn.Module):
    """Leads back by the first block's matrix, as a head does by its embedding's."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight, self.scale = weight, nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * (x @ self.weight).sum(1, keepdim=True)


def make_connect(scenario: dict[str, Any], device: FakeDevice) -> Any:
    """Return what connects over `device`, with gloo beside it where it is `split`; else None."""
    if "device" not in scenario:
        return None
    connect = lambda *args: device.connect(*args)  # noqa: E731
    return beside(connect, gloo.connect, is_gradient) if scenario.get("split") else connect


def is_gradient(tensor: Tensor) -> bool:
    """Return whether a tensor stands for one of the device, where two engines are together."""
    return tensor.dtype == torch.float32 and tensor.numel() > 1


CAPTURED: list[FakeGraph] = []
"""This rank's graph of the world of now."""


def replay_captured() -> None:
    for graph in CAPTURED:
        graph.replay()


def capture_worlds(trainer: Trainer, *, registered: bool) -> None:
    """Capture each world's communicator in a graph, which is `registered` to be destroyed."""
    form: Any = trainer._form

    def outer(members: tuple[int, ...]) -> Any:
        plan, group = form(members), trainer._group
        assert group is not None
        CAPTURED.clear()
        if isinstance(group.comm, FakeComm):
            time.sleep(0.1)  # An order may break the world before or amid a capture.
            CAPTURED.append(group.comm.capture())
            if registered:
                trainer.before_break(CAPTURED[-1].reset)
        return plan

    vars(trainer)["_form"] = outer


def make_trainer(
    scenario: dict[str, Any], model: nn.Module, compute: Any, membership: Line, connect: Any
) -> tuple[Any, Trainer]:
    """Return what is trained, replicated or sharded, and its loop; over gloo without `connect`."""
    common = {"count": scenario["batch"] // scenario["micro_batch"], "seed": 3}
    common |= {"exact": scenario.get("exact", False), "bucket_bytes": 4096}
    if "shard" not in scenario:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        replica = Replica(model, optimizer, clip_norm=1.0)
        state = ReplicatedState(replica, compute, **common)
        return replica, Trainer(state, membership=membership, connect=connect)
    from perdure.worker.elastic.state.sharded import ShardedReplica, ShardedState

    sharded = ShardedReplica(model, lambda ps: torch.optim.AdamW(ps, lr=1e-2), clip_norm=1.0)
    state = ShardedState(
        sharded, compute, me=membership.me, minimum=scenario["shard"],
        snapshot_every=scenario.get("every", 0), memory=find_memory(scenario, membership.me),
        **common,
    )  # fmt: skip
    return sharded, Trainer(state, membership=membership, connect=connect)


def make_stages(
    scenario: dict[str, Any],
    model: nn.Sequential,
    load: Any,
    killer: Killer,
    membership: Line,
    connect: Any,
) -> tuple[Any, Any]:
    """Return what is trained, cut into stages, and its loop."""
    from perdure.plan.elastic.stages import Model, choose_balanced, cut_balanced
    from perdure.worker.elastic.state.blocks import StagedReplica
    from perdure.worker.elastic.state.staged import StagedState
    from perdure.worker.pipeline import Runner

    killer.wrap(Runner, "_forward", "forward")
    killer.wrap(Runner, "_backward", "backward")
    replica = StagedReplica(list(model), lambda ps: torch.optim.AdamW(ps, lr=1e-2), clip_norm=1.0)
    schedule = scenario.get("schedule", "1f1b")
    runs = 2 if schedule == "interleaved" else 1
    shape = Model(replica.weights, replica.sizes, scenario["stages"], runs)
    choose: Any = functools.partial(choose_balanced, shape)
    if scenario.get("recut"):
        choose = lambda members, *_: cut_balanced(shape, len(members))  # noqa: E731
    if "shapes" in scenario:  # As many stages as it says of each epoch.
        choose = lambda members, *_: cut_balanced(  # noqa: E731
            Model(shape.weights, shape.sizes, scenario["shapes"][membership.epoch]), len(members)
        )
    state = StagedState(
        replica, load, nn.functional.mse_loss, me=membership.me,
        count=scenario["batch"] // scenario["micro_batch"], seed=3,
        exact=scenario.get("exact", False), schedule=schedule, choose=choose,
        bucket_bytes=scenario.get("bucket_bytes", 4096),
        snapshot_every=scenario.get("every", 0), memory=find_memory(scenario, membership.me),
        recompute=scenario.get("recompute", False),
    )  # fmt: skip
    return replica, Trainer(state, membership=membership, connect=connect)


def name_part(replica: Any) -> str | None:
    """Return what a rank has of the state; None where that is all."""
    part = getattr(replica, "shard", None) or getattr(replica, "runs", None)
    return part and str(part)


def hash_state(replica: Any) -> str:
    if hasattr(replica, "skeleton"):
        return hash_tensors([t for parts in replica.parts().values() for t in parts.values()])
    return hash_tensors(list(replica.model.state_dict().values()))


def hash_tied(replica: Any) -> dict[str, str]:
    """Return a hash of each shared parameter that is here, with all that its update depends on."""
    return {
        str(blocks): hash_tensors([parameter, *replica.optimizer.state[parameter].values()])
        for parameter, blocks in getattr(replica, "shared", {}).items()
        if parameter.numel() and parameter.ndim == 2
    }


def find_memory(scenario: dict[str, Any], me: int) -> Path | None:
    """Return where a member's snapshots are; with `nodes`, members take turns on them."""
    if "memory" not in scenario:
        return None
    return Path(scenario["memory"], f"n{me % scenario.get('nodes', 1)}")


class World:
    """The ranks of one scenario, and their controller."""

    def __init__(self, scenario: dict[str, Any]) -> None:
        self.scenario = scenario
        self.socks: dict[int, socket.socket] = {}
        self.pids: dict[int, int] = {}
        self.ends: dict[int, int] = {}
        self.finished: set[int] = set()
        self.epoch = 0
        self.members = tuple(range(scenario["ranks"]))
        self.deaths: list[float] = []
        self.retry_s = 0.0
        self.joined = 0
        self.stores: dict[int, str] = {}
        self.formed: set[int] = set()
        self.dismissed: set[int] = set()
        self.feeds: dict[int, str] = {}
        self.followers: set[int] = set()
        self.key = make_shared_certificate()
        self.joins: list[FollowWorld] = []
        self.repeat_s = 0.0
        self.cut: set[int] = set()
        """Members that were left out while they live."""
        self.reformed: list[WorldReformed] = []
        self.reasons: list[str] = []
        """What members did to be at the same step."""
        self.ready: list[int] = []
        """How far each follower said that it was."""
        self.followed_bytes: list[int] = []
        """What each was sent until then."""

    def fork(self, me: int, joins: bool) -> None:
        ours, theirs = socket.socketpair()
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                ours.close()
                run_rank(self.scenario, me, joins, theirs)
                code = 0
            except Exception as error:
                print(f"rank {me}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
                leave_without_device(error)
            finally:
                os._exit(code)
        theirs.close()
        self.socks[me], self.pids[me] = ours, pid

    def order(self, urgent: bool = True) -> None:
        self.members = tuple(
            m for m in self.members if m not in self.ends and m not in self.finished
        )
        if self.finished and not self.formed.intersection(self.members):
            return self.dismiss()
        self.epoch += 1
        self.retry_s = 0.0
        order = ReformWorld(
            generation=0, epoch=self.epoch, ranks=self.members, urgent=urgent, reason="test",
            store="" if "device" in self.scenario else self.find_store(),
        )  # fmt: skip
        for member in self.members:
            try:
                self.socks[member].sendall(encode(order) + b"\n")
            except OSError:
                continue  # It is dying: the next order leaves it out.
        self.order_following()

    def find_store(self) -> str:
        """Return the address of a member's store.

        Over a fake device all goes through the store: it may not end with a member.
        """
        return next((self.stores[m] for m in self.members if m in self.stores), "")

    def dismiss(self) -> None:
        """End who has come too late: there is no state left to be had, and nothing to do."""
        for member in self.members:
            self.dismissed.add(member)
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pids[member], signal.SIGKILL)

    def order_following(self) -> None:
        donors = {m: self.feeds[m] for m in self.members if m in self.feeds}
        self.joins = [
            FollowWorld(
                generation=0,
                epoch=self.epoch,
                rank=rank,
                donors=donors,
                key=self.key,
                reason="test",
            )
            for rank in self.followers
        ]
        self.repeat_joins()

    def repeat_joins(self) -> None:
        """Tell those that follow and their donors, as the controller does each second."""
        self.repeat_s = time.monotonic() + REPEAT_S
        for order in self.joins:
            for rank in set(order.ranks) - set(self.ends) if order.rank not in self.ends else ():
                with contextlib.suppress(OSError):
                    self.socks[rank].sendall(encode(order) + b"\n")

    def run(self) -> dict[str, Any]:
        deadline = time.monotonic() + self.scenario.get("timeout_s", PATIENCE_S)
        for me in self.members:
            self.fork(me, joins=False)
        while set(self.pids) - set(self.ends) - self.cut:
            if time.monotonic() > deadline:
                left = [pid for me, pid in self.pids.items() if me not in self.ends]
                for number in (signal.SIGUSR1, signal.SIGKILL):  # Stacks first.
                    for pid in left:
                        os.kill(pid, number)
                    time.sleep(1.0)
                return {"hung": True, "ends": self.ends, "epoch": self.epoch}
            self.listen(0.005)
            self.reap()
            self.cut_off()
            if time.monotonic() > self.repeat_s:
                self.repeat_joins()
            if self.retry_s and time.monotonic() > self.retry_s:
                self.order(urgent="shapes" not in self.scenario)
        for me in self.cut - set(self.ends):
            os.kill(self.pids[me], signal.SIGKILL)
            os.waitpid(self.pids[me], 0)
        return {
            "ends": self.ends,
            "dismissed": sorted(self.dismissed),
            "epoch": self.epoch,
            "deaths": self.deaths,
            "ready": self.ready,
            "followed_bytes": self.followed_bytes,
            "reasons": self.reasons,
            "formed": msgspec.to_builtins(self.reformed),
        }

    def cut_off(self) -> None:
        """Leave out the member that the scenario names, which lives and is told nothing."""
        me = self.scenario.get("cut", -1)
        out = Path(self.scenario["out"].format(me))
        if me in self.members and out.exists() and out.read_text().count("\n") >= 2:
            self.cut.add(me)
            self.members = tuple(m for m in self.members if m != me)
            self.order()

    def listen(self, wait_s: float) -> None:
        by_sock = {sock: me for me, sock in self.socks.items()}
        for sock in select.select(list(by_sock), [], [], wait_s)[0]:
            try:
                text = sock.recv(1 << 16)
            except ConnectionResetError:  # Killed with orders unread.
                text = b""
            if not text:
                self.socks.pop(by_sock[sock]).close()
                self.reap(wait=by_sock[sock])
                continue
            for line in text.splitlines():
                self.hear(by_sock[sock], decode(line, AnyEvent))

    def hear(self, me: int, event: AnyEvent) -> None:
        if isinstance(event, RankJoined):
            self.stores[me], self.feeds[me] = event.store, event.feed
            if me in self.followers:
                self.order_following()
        if isinstance(event, MemberReady) and me in self.followers:
            self.ready.append(event.step)
            self.followed_bytes.append(event.bytes)
            self.followers.discard(me)
            find_followed(self.scenario).touch()
            self.members = (*self.members, me)
            self.order(urgent=False)
        if isinstance(event, WorldBroken) and event.epoch == self.epoch:
            self.retry_s = self.retry_s or time.monotonic() + 0.3
        if isinstance(event, WorldReformed) and event.finished:
            self.finished.add(me)
            if len(self.finished) < len(self.members) and event.epoch < self.epoch:
                self.order()
        if isinstance(event, WorldReformed):
            self.formed.add(me)
            self.reformed.append(event)
            self.reasons.append(event.reason)
            there = sum(e.epoch == self.epoch and not e.finished for e in self.reformed)
            whole = there == len(self.members)
            if whole or not self.joined:
                self.join_next()
            if whole and self.epoch + 1 < len(self.scenario.get("shapes", ())):
                self.retry_s = time.monotonic() + self.scenario["rest_s"]

    def join_next(self) -> None:
        """Start one more member, should the scenario have one left."""
        left = self.scenario.get("joins", 0)
        if self.joined < left and self.epoch >= self.scenario.get("join_epoch", 0):
            self.joined += 1
            me = self.scenario["ranks"] + self.joined - 1
            self.fork(me, joins=True)
            if self.scenario.get("follow"):
                self.followers.add(me)
                return
            self.members = (*self.members, me)
            self.order(urgent=False)

    def reap(self, wait: int = -1) -> None:
        for me, pid in self.pids.items():
            if me in self.ends:
                continue
            done, status = os.waitpid(pid, 0 if me == wait else os.WNOHANG)
            if done:
                self.ends[me] = os.waitstatus_to_exitcode(status)
                if me in self.followers:
                    find_followed(self.scenario).touch()
                if self.ends[me]:
                    self.deaths.append(time.monotonic())
                if me in self.members and me not in self.finished:
                    self.order()


def serve_store() -> tuple[int, int]:
    """Serve a store from a process of its own; return its pid and port.

    A server's thread here might hold a lock in the moment in which a rank is forked.
    """
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        store: Any = vars(dist)["TCPStore"]
        served = store(
            "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=300)
        )
        os.write(writer, str(served.port).encode())
        while os.getppid() != 1:
            time.sleep(1.0)
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as file:
        select.select([file], [], [], PATIENCE_S)
        return pid, int(os.read(reader, 16))


def run_scenario(scenario: dict[str, Any]) -> None:
    """Run one scenario; write what became of it, and what its ranks have said."""
    with open(scenario["log"], "w") as log:
        os.dup2(log.fileno(), sys.stderr.fileno())
    pid, port = serve_store()
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(scenario["ranks"]),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    try:
        Path(scenario["answer"]).write_text(json.dumps(World(scenario).run()))
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def main(at_once: int) -> int:
    """Run all scenarios in `at_once` processes; return 1 if one of these failed."""
    scenarios = [json.loads(line) for line in sys.stdin]
    pids = []
    for first in range(at_once):
        pids.append(os.fork())
        if pids[-1] == 0:
            code = 1
            try:
                for scenario in scenarios[first::at_once]:
                    run_scenario(scenario)
                code = 0
            except Exception:
                traceback.print_exc()
            finally:
                os._exit(code)
    return int(any([os.waitpid(pid, 0)[1] for pid in pids]))


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 1))
