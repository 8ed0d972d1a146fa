"""What is copied beside training, and what is copied at once since nobody would wait for it."""

import contextlib
import itertools
import threading
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from tests.played_device import PlayedDevice
from torch import Tensor, nn

from perdure.model.errors import PlatformError
from perdure.model.events import CheckpointFailed
from perdure.model.job import CheckpointConfig
from perdure.worker.checkpoint import Checkpointer, copying, device_copies
from perdure.worker.checkpoint import staging as module
from perdure.worker.checkpoint.device_copies import split
from perdure.worker.checkpoint.plain import read_plain_state
from perdure.worker.checkpoint.staging import Staging

KEY = "model.weight"


_STARTS = itertools.count(0.5, 1000.0)


@pytest.fixture
def weight() -> Tensor:
    """Return values that no memory of another test holds, which the copy may get."""
    return torch.full((1 << 16,), float(next(_STARTS)))


def begin(staging: Staging, weight: Tensor) -> tuple[Tensor, bool]:
    """Begin to copy `weight`; return the copy, and whether it is there at once."""
    weight += 1
    copy = staging.begin({KEY: weight}, {KEY})[KEY]
    return copy, torch.equal(copy, weight)


def pass_gate(staging: Staging) -> None:
    staging.enter_update()
    staging.leave_update()


def test_beside_training_is_copied_what_an_optimizer_waits_for(weight: Tensor) -> None:
    staging = Staging()
    pass_gate(staging)
    copy, at_once = begin(staging, weight)
    assert not at_once
    staging.copy.make()
    pass_gate(staging)
    assert torch.equal(copy, weight)


def test_a_copy_that_is_late_is_thrown_away(
    weight: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copying, "DEADLINE_S", 0.1)
    staging = Staging()
    pass_gate(staging)
    begin(staging, weight)
    pass_gate(staging)
    for confirm in (staging.copy.confirm, staging.copy.make):  # As the writer does, too late.
        with pytest.raises(PlatformError, match="not made within"):
            confirm()
    assert not begin(staging, weight)[1], "the next one is copied beside training all the same"
    staging.copy.make()
    pass_gate(staging)
    staging.copy.confirm()


def test_an_update_that_passes_no_gate_has_all_copied_at_once(weight: Tensor) -> None:
    staging = Staging()
    for _ in range(2):  # A graph that was captured before perdure knew of the optimizer.
        copy, at_once = begin(staging, weight)
        assert at_once
        with torch.autograd._unsafe_preserve_version_counter((weight,)):
            weight += 10
        staging.copy.make()
        assert torch.equal(copy + 10, weight)
    pass_gate(staging)
    assert not begin(staging, weight)[1]


@pytest.fixture
def captured(weight: Tensor, monkeypatch: pytest.MonkeyPatch) -> Staging:
    """A step that was captured while a copy was under way."""
    staging = Staging()
    pass_gate(staging)
    begin(staging, weight)
    with monkeypatch.context() as capture:
        capture.setattr(module, "is_capturing", lambda: True)
        assert staging.enter_update() == 0.0, "a capture waits for nothing"
        staging.leave_update()
    return staging


def test_after_a_capture_all_is_copied_at_once_whatever_passes_the_gate(
    captured: Staging, weight: Tensor
) -> None:
    captured.copy.make()
    for _ in range(2):
        pass_gate(captured)
        assert begin(captured, weight)[1]
        captured.copy.make()


def test_a_replay_that_passes_the_gate_waits_for_the_copy(
    captured: Staging, weight: Tensor
) -> None:
    copied = []

    class Done(threading.Event):
        """Has the copy made once somebody waits for it."""

        def wait(self, timeout: float | None = None) -> bool:
            copying = threading.Thread(target=captured.copy.make)
            copying.start()
            there = super().wait(timeout)
            copied.append(there)
            copying.join()
            return there

    captured.copy.made = Done()
    assert captured.enter_replay() > 0.0
    assert copied == [True]
    _, at_once = begin(captured, weight)
    assert not at_once
    captured.copy.make()


# --- on a device that is played ---------------------------------------------------------------


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> PlayedDevice:
    return PlayedDevice(monkeypatch)


def test_small_tensors_of_a_device_are_waited_for_once(device: PlayedDevice) -> None:
    staging = Staging(device)
    state = {str(n): torch.full((n % 7,), float(n)) for n in range(100)}
    steps = [torch.tensor(float(n)) for n in range(100)]
    of_cpu = torch.ones(3, dtype=torch.int16)
    own = {"steps": steps, "of the CPU": of_cpu, "others": ("text", numpy.arange(3))}
    for _ in range(2):
        copies, copied = staging.begin(state, state), staging.copy_own(own)
        staging.copy.make()
    assert device.current.said == ["synchronize"] * 4
    for value in (*state.values(), *steps):
        value += 1
    assert all(torch.equal(copies[key] + 1, value) for key, value in state.items())
    assert [one.item() + 1 for one in copied["steps"]] == [one.item() for one in steps]
    assert copied["of the CPU"].equal(of_cpu)
    assert copied["others"][0] == "text"
    assert numpy.array_equal(read_plain_state(copied["others"])[1], numpy.arange(3))
    assert device.blocks == [1 << 20, 1 << 20], "one for each of the two"


def test_what_moves_between_a_device_and_the_cpu_moves_its_copy(device: PlayedDevice) -> None:
    staging = Staging(device)
    for dtype in (torch.float32, torch.int16, torch.float32):
        state = {"one": torch.ones(5, dtype=dtype), "other": torch.ones(5, dtype=torch.int16)}
        copies = staging.begin(state, ())
        staging.copy.make()
        assert all(torch.equal(copies[key], value) for key, value in state.items())
        fitted = [set(slabs._places) for slabs in (staging._pinned, staging._pageable)]
        assert fitted == ([{"one"}, {"other"}] if dtype.is_floating_point else [set(), set(state)])


def test_all_late_copies_of_a_device_go_over_one_stream(
    device: PlayedDevice, weight: Tensor
) -> None:
    staging = Staging(device)
    small, of_cpu = torch.ones(3), torch.ones(1 << 14, dtype=torch.int16)
    state = {KEY: weight, "small": small, "of the CPU": of_cpu}
    for number in range(3):
        pass_gate(staging)
        weight += 1
        of_cpu += 1
        copies = staging.begin(state, state)
        assert torch.equal(copies["of the CPU"], of_cpu), "the gate would hold the device alone"
        staging.copy.make()
        assert torch.equal(copies[KEY], weight)
        (stream,) = device.made
        assert len(device.used) == number + 1
        wait, _ = stream.said[-2:]
        assert wait[1] in device.current.said, "it begins once the update is done"


def test_large_tensors_go_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_copies, "CHUNK_BYTES", 1000)
    sources = [
        torch.randn(10_000), torch.randn(1, 5000), torch.randn(200, 100).t(),
        torch.randn(4, 3, 50, 7).to(memory_format=torch.channels_last), torch.randn(3, 5)[:, ::2],
        torch.randn(2, 4000)[:, ::2], torch.randn(1, 300).expand(9, 300),
    ]  # fmt: skip
    for source in sources:
        target = torch.empty(source.shape)
        pieces = list(split(target, source))
        for part, piece in pieces:
            part.copy_(piece)
        assert torch.equal(target, source)
        row = source[:1].nbytes if not source.is_contiguous() else 0
        assert all(piece.nbytes <= max(1000, row) for _, piece in pieces)
    other = torch.nn.Parameter(torch.randn(10_000))
    assert len(list(split(torch.empty(10_000), other))) == 1, "a class of its own goes as one"


class Net(nn.Module):
    """Parameters of several kinds, and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(8, 96, 3)
        self.conv.weight.data = self.conv.weight.data.to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm2d(96)
        self.linear = nn.Linear(96, 80, dtype=torch.bfloat16)
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.register_buffer("mask", torch.tensor([True, False]))

    def forward(self, inputs: Tensor) -> Tensor:
        found = self.norm(self.conv(inputs)).mean((2, 3))
        return self.linear(found.to(torch.bfloat16)).float().square().mean()


def make_trainee(place: Path, staging: Staging, seed: int) -> tuple[Any, ...]:
    torch.manual_seed(seed)
    net, events = Net(), list[Any]()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    saver = Checkpointer(
        url=str(place), config=CheckpointConfig(keep_last=1), rank=0, world_size=1, generation=0,
        emit=events.append, now=lambda: 0.0,
    )  # fmt: skip
    saver._staging = staging
    saver.register("model", net)
    saver.register("optimizer", optimizer)
    return net, optimizer, saver, events


def train(net: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = net(torch.randn(4, 8, 6, 6))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("played", [True, False])
def test_what_is_loaded_is_what_was_there_to_the_bit(
    device: PlayedDevice, tmp_path: Path, played: bool
) -> None:
    staging = Staging(device if played else None)
    net, optimizer, saver, events = make_trainee(tmp_path, staging, 1)
    for number in range(4):  # The first has no moments yet.
        saver.save(number + 1, reason="test", extra={})
        rest = train(net, optimizer, 3)
        saver.close()
    assert not [event for event in events if isinstance(event, CheckpointFailed)]
    assert bool(device.made) == played
    other, optimizer, saver, _ = make_trainee(tmp_path, Staging(), 2)
    assert saver.restore({}) == 4
    assert train(other, optimizer, 3) == rest
    for one, two in zip(net.state_dict().values(), other.state_dict().values(), strict=True):
        assert one.dtype == two.dtype
        assert torch.equal(one, two)


@pytest.mark.long
def test_later_checkpoints_pin_nothing_more(device: PlayedDevice, tmp_path: Path) -> None:
    net, optimizer, saver, events = make_trainee(tmp_path, Staging(device), 1)
    train(net, optimizer, 1)
    with contextlib.closing(saver):
        for number in range(12):
            saver.save(number + 1, reason="test", extra={})
            train(net, optimizer, 1)
            if number == 0:
                saver.close()
                made = len(device.blocks)
    assert not [event for event in events if isinstance(event, CheckpointFailed)]
    assert len(device.blocks) == made
    assert len(device.made) == 1
