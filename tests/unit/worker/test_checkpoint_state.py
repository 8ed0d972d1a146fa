"""What a checkpoint holds and what it refuses: snapshots, optimizer state, the index, retention."""

import io
import pickle
import re
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tests.waiting import PATIENCE_S

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from tests.played_device import PlayedDevice, PlayedEvent  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.algorithms.ddp_comm_hooks import (  # noqa: E402
    default_hooks,
    powerSGD_hook,
)

from perdure.model.checkpoints import FileEntry, Manifest  # noqa: E402
from perdure.model.errors import ConfigError, PlatformError  # noqa: E402
from perdure.model.events import CheckpointFailed, CheckpointRestored, CheckpointSaved  # noqa: E402
from perdure.model.job import CheckpointConfig  # noqa: E402
from perdure.worker.checkpoint import Checkpointer, attributes  # noqa: E402
from perdure.worker.checkpoint import staging as staging_module  # noqa: E402
from perdure.worker.checkpoint.files import Remote, choose_kept_steps  # noqa: E402
from perdure.worker.checkpoint.index import read_plain  # noqa: E402
from perdure.worker.checkpoint.registry import Registry  # noqa: E402
from perdure.worker.checkpoint.staging import Staging  # noqa: E402

pytestmark = pytest.mark.torch


def make_saver(url: str, **config: Any) -> tuple[Checkpointer, list[Any]]:
    events: list[Any] = []
    saver = Checkpointer(
        url=url, config=CheckpointConfig(**config), rank=0, world_size=1, generation=0,
        emit=events.append, now=lambda: 0.0,
    )  # fmt: skip
    return saver, events


# --- snapshot ---------------------------------------------------------------------------------


def test_gate_waits_until_what_is_late_is_copied() -> None:
    staging = Staging()
    pass_gate(staging)
    big, small = torch.ones(5000), torch.ones(5)
    staged = staging.begin({"big": big, "small": small}, {"big", "small"})
    assert staged["small"].sum() == 5
    assert not staging.copy.made.is_set()
    staging.copy.make()
    staging.copy.wait()
    assert staging.copy.wait() == 0.0
    assert staged["big"].sum() == 5000
    assert staging.begin({"big": big, "small": small}, set())["big"] is staged["big"]  # reused


def pass_gate(staging: Staging) -> None:
    """Pass the gate of an optimizer's step that changes nothing."""
    staging.enter_update()
    staging.leave_update()


def test_torn_snapshot_fails_and_the_next_one_copies_at_once(tmp_path: Path) -> None:
    saver, events = make_saver(str(tmp_path))
    model = nn.Linear(100, 100)
    saver.register("model", model)
    saver.register("optimizer", torch.optim.SGD(model.parameters(), lr=0.1))
    pass_gate(saver._staging)
    saver._staging.begin(saver._registry.tensors(), {"model.model.weight"})
    with torch.no_grad():
        model.weight.mul_(2)  # By hand, past the gate.
    with pytest.raises(PlatformError, match="weight was changed"):
        saver._staging.copy.make()
    pass_gate(saver._staging)
    saver.save(1, reason="test", extra={})
    with torch.no_grad():
        model.weight.zero_()
    saver.close()
    assert [type(event) for event in events] == [CheckpointSaved]
    saver.restore({})
    assert model.weight.abs().sum() > 0


@pytest.mark.parametrize("by_hand", [False, True])
def test_on_a_device_the_next_update_may_come_before_the_copy_is_done(
    by_hand: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    device, weight = PlayedDevice(monkeypatch), torch.ones(100, 100)
    staging = Staging(device)
    pass_gate(staging)
    staging.begin({"weight": weight}, {"weight"})
    (event,) = (said for said in device.made[0].said if isinstance(said, PlayedEvent))
    event.done.clear()
    if by_hand:
        weight.mul_(2)
    with ThreadPoolExecutor(1) as pool:
        copy = pool.submit(staging.copy.make)
        staging.enter_update()
        assert device.current.said[-1] == ("wait", event)  # The device waits, the CPU goes on:
        weight.add_(1)
        event.done.set()
        if by_hand:
            with pytest.raises(PlatformError, match="weight was changed"):
                copy.result(PATIENCE_S)
        else:
            copy.result(PATIENCE_S)
    pass_gate(staging)
    staging.begin({"weight": weight}, {"weight"})
    assert device.current.said[-1] == "synchronize" if by_hand else len(device.used) == 2


def test_a_state_that_cannot_be_taken_fails_the_save_and_not_the_training(tmp_path: Path) -> None:
    class Broken:
        def state_dict(self) -> dict[str, Any]:
            raise ValueError("no state today")

        def load_state_dict(self, state: dict[str, Any]) -> None: ...

    saver, events = make_saver(str(tmp_path))
    saver.register("broken", Broken())
    saver.save(1, reason="test", extra={})
    saver.close()
    (failed,) = events
    assert isinstance(failed, CheckpointFailed)
    assert failed.error == "broken.state_dict() failed: ValueError('no state today')"


def test_objects_that_need_pickle_are_refused_unless_allowed(tmp_path: Path) -> None:
    class Odd:
        state: Any = Path("here")

        def state_dict(self) -> dict[str, Any]:
            return {"path": self.state}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.state = state["path"]

    for allow, kind in ((False, CheckpointFailed), (True, CheckpointSaved)):
        saver, events = make_saver(str(tmp_path), allow_pickle=allow)
        saver.register("odd", odd := Odd())
        saver.save(1, reason="test", extra={})
        saver.close()
        assert [type(event) for event in events] == [kind]
    odd.state = None
    assert saver.restore({}) == 1
    assert odd.state == Path("here")


# --- optimizer --------------------------------------------------------------------------------


def test_optimizer_state_comes_back_as_it_was_and_only_that(tmp_path: Path) -> None:
    """Moments in another type than their parameter, none where there was no gradient."""
    model = nn.ModuleDict({"used": nn.Linear(8, 8), "unused": nn.Linear(8, 8)}).bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for parameter in model["used"].parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    moment = torch.full((8, 8), 1 / 3)
    optimizer.state[model["used"].weight]["exp_avg"] = moment.clone()
    optimizer.param_groups[0]["lr"] = 0.025
    saver, _ = make_saver(str(tmp_path))
    saver.register("model", model)
    saver.register("optimizer", optimizer)
    saver.save(1, reason="test", extra={})
    saver.close()
    optimizer.state.clear()
    optimizer.param_groups[0]["lr"] = 0.0
    assert saver.restore({}) == 1
    assert torch.equal(optimizer.state[model["used"].weight]["exp_avg"], moment)
    assert model["unused"].weight not in optimizer.state
    assert optimizer.param_groups[0]["lr"] == 0.025


class Table:
    def __init__(self, **state: int) -> None:
        self.state = state

    def state_dict(self) -> dict[str, int]:
        return self.state

    def load_state_dict(self, state: dict[str, int]) -> None:
        for key in self.state:
            state[key]


LINEAR = nn.Linear(4, 4)
CHANGES: dict[str, tuple[str, Any, Any, str]] = {
    "shape": ("model", nn.Linear(4, 4), nn.Linear(4, 5),
              "the parameter weight has the shape [5, 4], and [4, 4] in the checkpoint"),
    "parameter": ("model", nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4)),
                  "model 'model': the checkpoint has the parameter bias, and the script does not"),
    "optimizer": (
        "optimizer", torch.optim.Adam(LINEAR.parameters()),
        torch.optim.Adam([LINEAR.weight, *nn.Linear(2, 2).parameters()]),
        "optimizer 'optimizer': it steps group0.1, and did not when the checkpoint was made",
    ),
    "object": ("own", Table(a=1), Table(a=1, b=2), "object 'own': KeyError: 'b'"),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_script_is_told_so_and_never_begins_at_zero(tmp_path: Path, change: str) -> None:
    name, before, after, said = CHANGES[change]
    saver, other = make_saver(str(tmp_path))[0], make_saver(str(tmp_path))[0]
    for one, changed in ((saver, before), (other, after)):
        one.register("linear", LINEAR)
        one.register(name, changed)
    saver.save(1, reason="test", extra={})
    saver.close()
    told = re.escape("step-00000001 does not fit the script: ") + ".*" + re.escape(said)
    with pytest.raises(ConfigError, match=told):
        other.restore({})


def test_of_several_ranks_only_what_is_kept_equal_is_shared() -> None:
    registry = Registry(rank=2, world_size=3)
    registry.add("stage", nn.BatchNorm1d(3))
    assert set(registry.tensors()) == {"model.stage.weight@2", "model.stage.bias@2"}
    assert "running_mean" in registry.own()["models"]["stage"]


def test_tied_parameters_are_saved_once_and_frozen_ones_too() -> None:
    model = nn.ModuleDict({"a": nn.Linear(3, 3, bias=False), "b": nn.Linear(3, 3, bias=False)})
    model["b"].weight = model["a"].weight
    model["c"] = nn.Linear(3, 3, bias=False).requires_grad_(False)
    registry = Registry()
    registry.add("model", model)
    registry.add("optimizer", torch.optim.SGD(model["a"].parameters(), lr=0.1))
    assert set(registry.tensors()) == {"model.model.a.weight", "model.model.c.weight"}
    assert registry.gated(registry.tensors()) == {"model.model.a.weight"}
    assert registry.own()["models"] == {"model": {}}


# --- index, retention, remote -----------------------------------------------------------------


class Hostile:
    def __reduce__(self) -> Any:
        return (print, ("owned",))


def test_index_makes_nothing_but_its_own_types(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(pickle.UnpicklingError, match=r"builtins\.print"):
        read_plain(pickle.dumps(Hostile()))
    module, name = b"torch.distributed.checkpoint.filesystem", b"os.system"
    dotted = b"\x80\x04\x8c%c%s\x8c%c%s\x93." % (len(module), module, len(name), name)
    with pytest.raises(pickle.UnpicklingError, match=r"os\.system"):
        read_plain(dotted)
    assert capsys.readouterr().out == ""
    kept = io.BytesIO()
    pickle.dump([torch.float32, torch.Size([2])], kept)
    assert read_plain(kept.getvalue()) == [torch.float32, torch.Size([2])]


def test_retention_never_takes_the_checkpoint_that_was_just_saved_for_an_older_future() -> None:
    config = CheckpointConfig(keep_last=1)
    # 100 was damaged: training went back to 60, and 80 is the newest that can be used.
    assert choose_kept_steps([60, 80, 100], config, 80, lambda step: None) == {80, 100}
    assert choose_kept_steps([80, 100, 120], config, 120, lambda step: None) == {120}


def test_remote_retention_goes_by_what_is_there(tmp_path: Path) -> None:
    remote = Remote(f"local://{tmp_path}/there")
    for step in (4, 5, 6):
        local = tmp_path / f"step-0000000{step}"
        local.mkdir()
        (local / "a").write_bytes(b"1")
        (local / "manifest.json").write_text("{}")
        entry = FileEntry("a", 1, "")
        remote.upload(local, Manifest(step=step, world_size=1, files=(entry,)))
    remote.apply_retention(CheckpointConfig(keep_last=1, keep_every_steps=4), 6)
    assert sorted(remote.list_names()) == ["step-00000004", "step-00000006"]
    assert remote.fetch(tmp_path / "new", "step-00000004") == ""
    assert (tmp_path / "new" / "step-00000004" / "a").read_bytes() == b"1"
    assert "cannot be fetched" in remote.fetch(tmp_path / "new", "step-00000005")
    assert list((tmp_path / "new").glob("*.tmp")) == []


def test_writer_gives_way_to_an_optimizer_step_but_not_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waits = threading.Event()

    class Calm(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            waits.set()
            return super().wait(timeout)

    monkeypatch.setattr(staging_module, "GIVE_WAY_S", 3600.0)
    staging = Staging()
    staging._calm = Calm()
    staging.leave_update()
    staging.give_way()
    waits.clear()
    staging.enter_update()
    written = threading.Event()
    writer = threading.Thread(target=lambda: (staging.give_way(), written.set()))
    writer.start()
    assert waits.wait(PATIENCE_S)
    assert not written.is_set()
    staging.leave_update()
    assert written.wait(PATIENCE_S)
    writer.join()
    staging.enter_update()
    monkeypatch.setattr(staging_module, "GIVE_WAY_S", 0.01)
    staging.give_way()  # Nobody says that this step is over: it raised.
    monkeypatch.setattr(staging_module, "GIVE_WAY_S", 3600.0)
    staging.give_way()


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("has_state", [False, True])
def test_a_hook_of_ddp_with_a_state_is_not_called_exact(
    group: None, has_state: bool, tmp_path: Path
) -> None:
    for step in (1, 0):
        saver, events = make_saver(str(tmp_path))
        model = nn.parallel.DistributedDataParallel(nn.Linear(4, 4))
        if has_state:
            state = powerSGD_hook.PowerSGDState(None)
            model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        else:
            model.register_comm_hook(None, default_hooks.allreduce_hook)
        saver.register("model", model)
        if step:
            saver.save(step, reason="test", extra={})
            saver.close()
    saver.restore({})
    (restored,) = (event for event in events if isinstance(event, CheckpointRestored))
    assert ("the state of DDP's hook in model." in restored.why_not_exact) == has_state


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_an_object_that_is_registered_after_a_step_gets_no_state_of_long_ago(
    steps: int, tmp_path: Path
) -> None:
    """Its checkpoint may be gone by then."""
    before, _ = make_saver(str(tmp_path))
    model, late = nn.Linear(2, 2), nn.Linear(2, 2)
    before.register("model", model)
    before.register("late", late)
    before.save(1, reason="test", extra={})
    before.close()
    saver, _ = make_saver(str(tmp_path))
    saver.register("model", nn.Linear(2, 2))
    assert saver.restore({}) == 1
    for _ in range(steps):
        saver.begin_step()
    if steps == 2:
        shutil.rmtree(tmp_path)
    fresh = nn.Linear(2, 2)
    saver.register("late", fresh)
    assert torch.equal(fresh.weight, late.weight) == (steps < 2)


# --- attributes -------------------------------------------------------------------------------


class Heated(nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 2)
        self.heat, self.kept, self.maps = 1.0, 3, None


def test_only_attributes_that_have_changed_are_kept_and_an_edited_constant_stays(
    tmp_path: Path,
) -> None:
    model = nn.Sequential(Heated(), nn.Dropout(0.1))
    saver, _ = make_saver(str(tmp_path))
    saver.register("model", model)
    model[0].heat, model[0].maps, model[1].p = 0.5, torch.ones(3), 0.2
    saver.save(1, reason="test", extra={})
    saver.close()
    again = nn.Sequential(Heated(), nn.Dropout(0.3, inplace=True))
    again[0].kept = 5
    other, _ = make_saver(str(tmp_path))
    other.register("model", again)
    assert other.restore({}) == 1
    assert (again[0].heat, again[0].kept, again[1].p) == (0.5, 5, 0.2)
    assert again[1].inplace
    assert torch.equal(again[0].maps, torch.ones(3))


def test_an_attribute_that_is_too_large_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attributes, "BYTES_MAX", 8)
    model = nn.Sequential(Heated())
    saver, _ = make_saver(str(tmp_path))
    saver.register("model", model)
    model[0].maps = torch.ones(3)
    saver.save(1, reason="test", extra={})
    saver.close()
    other, events = make_saver(str(tmp_path))
    other.register("model", nn.Sequential(Heated()))
    other.restore({})
    (restored,) = [e for e in events if isinstance(e, CheckpointRestored)]
    assert restored.why_not_exact == "too large for a checkpoint: model.0.maps"


def test_a_class_that_torch_puts_in_front_hides_no_attribute() -> None:
    in_front = type("FSDPHeated", (Heated,), {"__module__": "torch.distributed.fsdp"})
    model = in_front()
    born = attributes.note_attributes({"model": model})
    model.heat = 0.25
    assert attributes.read_changed({"model": model}, born) == {"model": {"heat": 0.25}}
    plain = nn.Dropout(0.1)
    born = attributes.note_attributes({"plain": plain})
    plain.p = 0.5
    assert attributes.read_changed({"plain": plain}, born) == {"plain": {"p": 0.5}}
