"""Two engines beside each other, chosen by a device; what they move is `tests/contract`'s."""

import pytest

pytest.importorskip("torch")

import torch
import torch.distributed as dist
from tests.fake_communicator import FakeDevice
from torch import nn

from perdure.worker.elastic.apart import Broken
from perdure.worker.elastic.communicators import Ticket, gloo, split
from perdure.worker.elastic.communicators.lone import LoneComm
from perdure.worker.elastic.communicators.split import SplitComm, beside, choose_engine
from perdure.worker.elastic.state.blocks import StagedReplica
from perdure.worker.elastic.state.replicated import Replica
from perdure.worker.elastic.state.sharded import ShardedReplica

pytestmark = pytest.mark.torch


class Engine(LoneComm):
    """One that notes what it is asked for, and says that the last message came when told."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.coming = Ticket("receive", None)
        self.place = torch.empty(0)
        self.idle = True

    def all_reduce(self, tensor: torch.Tensor) -> Ticket:
        self.asked.append(f"sum on {tensor.device.type}")
        return super().all_reduce(tensor)

    def receive(self, tensor: torch.Tensor, source: int, tag: int) -> Ticket:
        self.asked.append(f"message to {tensor.device.type}")
        self.place = tensor
        return self.coming

    def drained(self, timeout_s: float) -> bool:
        return self.idle

    def break_(self) -> None:
        self.asked.append("break")

    def close(self) -> None:
        self.asked.append("close")


def make() -> tuple[Engine, Engine, SplitComm]:
    device, host = Engine(), Engine()
    return device, host, SplitComm(device, host, lambda tensor: tensor.device.type != "cpu")


def test_sums_go_by_where_a_tensor_is_and_messages_by_way_of_the_cpu() -> None:
    device, host, comm = make()
    comm.all_reduce(torch.ones(1))
    comm.all_reduce(torch.ones(1, device="meta"))
    ticket = comm.receive(torch.ones(1, device="meta"), 1, 0)
    assert comm.poll(ticket) == "running"
    host.coming.end()
    assert comm.poll(ticket) == "done"
    assert device.asked == ["sum on meta"]
    assert host.asked == ["sum on cpu", "message to cpu"]


def test_a_break_is_of_both_and_either_may_have_lost_the_device() -> None:
    device, host, comm = make()
    ticket = comm.receive(torch.ones(1, device="meta"), 1, 0)
    comm.break_()
    comm.close()
    assert device.asked[-2:] == host.asked[-2:] == ["break", "close"]
    device.idle = False
    assert not comm.drained(0.1)
    assert (comm.poll(ticket), ticket.error) == ("failed", "the world was broken")


def test_who_does_not_come_to_one_is_not_waited_for_on_the_other() -> None:
    host = Engine()
    connect = beside(FakeDevice(build_s=0.1).connect, lambda *_: host, lambda tensor: True)
    with pytest.raises(Broken, match="did not come"):
        connect(dist.HashStore(), 0, 2, lambda: False)
    assert host.asked == ["close"]


def test_the_engine_is_chosen_by_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose_engine(torch.device("cpu")) is gloo.connect
    asked = list[str]()
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(split, "open_device", lambda name: asked.append(name) or (lambda *_: 0))
    monkeypatch.setattr(gloo, "connect", lambda *_: Engine())
    comm = choose_engine(torch.device("cuda:1"))(dist.HashStore(), 0, 2, lambda: False)
    assert isinstance(comm, SplitComm)
    assert asked == ["cuda:1"]
    monkeypatch.setattr(dist, "is_nccl_available", lambda: False)
    assert choose_engine(torch.device("cuda:1"))(0, 0, 2, lambda: False).__class__ is Engine


def test_each_state_says_where_what_it_trains_is() -> None:
    def make_model() -> nn.Sequential:
        frozen = nn.Linear(2, 2).requires_grad_(False)
        return nn.Sequential(frozen, nn.Linear(2, 2, device="meta"))

    model = make_model()
    replica = Replica(model, torch.optim.SGD(model[1].parameters(), lr=0.1))
    assert replica.device.type == "meta"
    staged = StagedReplica(list(make_model()), lambda ps: torch.optim.SGD(ps, lr=0.1))
    assert staged.device.type == "meta"
    sharded = ShardedReplica(nn.Linear(2, 2), lambda ps: torch.optim.SGD(ps, lr=0.1))
    assert sharded.device.type == "cpu"
