"""Neighbours' snapshots of a device's state: their memory is registered while it is mapped."""

import contextlib
import gc
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.played_device import PlayedDevice
from tests.waiting import PATIENCE_S
from torch import Tensor

from perdure.plan.elastic.shards import Shard, Snapshot
from perdure.worker.checkpoint import copying
from perdure.worker.checkpoint.copying import Copy
from perdure.worker.elastic.group import Broken
from perdure.worker.elastic.mapped import MappedFile
from perdure.worker.elastic.snapshots import Snapshots


class PlayedRuntime:
    """CUDA's runtime, which knows what is registered and whether it is mapped."""

    def __init__(self) -> None:
        self.registered: dict[int, int] = {}
        self.calls: list[str] = []
        self.answer = 0

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        assert is_mapped(address)
        assert not self.registered.keys() & {address}
        self.calls.append("register")
        if self.answer == 0:
            self.registered[address] = size
        return self.answer

    def cudaHostUnregister(self, address: int) -> int:
        assert is_mapped(address), "it was unmapped before"
        self.calls.append("unregister")
        del self.registered[address]
        return 0


def is_mapped(address: int) -> bool:
    rows = Path("/proc/self/maps").read_text().splitlines()
    bounds = [[int(part, 16) for part in row.split()[0].split("-")] for row in rows]
    return any(begin <= address < end for begin, end in bounds)


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> PlayedRuntime:
    played = PlayedRuntime()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: played)
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    return played


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> PlayedDevice:
    return PlayedDevice(monkeypatch)


@pytest.fixture
def snapshots(tmp_path: Path, device: PlayedDevice) -> Snapshots[Snapshot]:
    return Snapshots(tmp_path / "a" / "b", 0, Snapshot, every=1, device=device)


def take(snapshots: Snapshots[Snapshot], step: int, content: Any, *, me: int = 0) -> Snapshot:
    snapshot = Snapshot(step, 0, Shard(0, 1), me)
    snapshots.take(snapshot, content, (0, 1))
    snapshots.finish()
    assert snapshots.error == ""
    return snapshot


def read(snapshots: Snapshots[Snapshot], snapshot: Snapshot) -> Any:
    return snapshots.make_reader()(snapshot)


def test_memory_is_registered_once_a_slot_and_until_it_is_unmapped(
    snapshots: Snapshots[Snapshot], runtime: PlayedRuntime, device: PlayedDevice
) -> None:
    for step in range(6):
        content = {"w": torch.full((5000,), float(step)), "of the CPU": torch.ones(3).short()}
        snapshot = take(snapshots, step, content)
        assert torch.equal(read(snapshots, snapshot)["w"], content["w"])
        assert torch.equal(read(snapshots, snapshot)["of the CPU"], content["of the CPU"])
    assert runtime.calls == ["register"] * 2, "one for each of two slots"
    assert len(device.made) == 1
    wait, _ = device.made[0].said[-2:]
    assert wait == ("wait", device.current.said[-1]), "it is copied as it was when it was taken"
    held = list(snapshots._maps.values())
    for step in (6, 7):  # Other sizes: both are mapped anew, whoever has hold of the old ones.
        content = {"w": torch.full((9000,), float(step))}
        assert torch.equal(read(snapshots, take(snapshots, step, content))["w"], content["w"])
    assert runtime.calls == ["register"] * 2 + ["unregister", "register"] * 2
    del held
    addresses = list(runtime.registered)
    snapshots.close()
    assert runtime.registered == {}
    gc.collect()
    assert not any(map(is_mapped, addresses))


def test_memory_of_who_closes_nothing_is_unregistered_as_well(
    tmp_path: Path, device: PlayedDevice, runtime: PlayedRuntime
) -> None:
    snapshots = Snapshots(tmp_path / "a" / "b", 0, Snapshot, every=1, device=device)
    take(snapshots, 1, {"w": torch.ones(5000)})
    del snapshots
    gc.collect()
    assert runtime.calls == ["register", "unregister"]


def test_a_disk_without_room_leaves_nothing_registered(
    snapshots: Snapshots[Snapshot],
    runtime: PlayedRuntime,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for step in (1, 2):
        take(snapshots, step, {"w": torch.ones(5000)})

    def refuse(*_: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr("os.posix_fallocate", refuse)
        snapshots.take(Snapshot(3, 0, Shard(0, 1), 0), {"w": torch.ones(9000)}, (0,))
        snapshots.finish()
    assert "No space left" in snapshots.error
    assert runtime.calls == ["register", "register", "unregister"]
    take(snapshots, 4, {"w": torch.ones(9000)})
    snapshots.close()
    assert runtime.registered == {}


@pytest.mark.parametrize("why", ["refused", "no such call", "no CUDA"])
def test_what_cannot_be_registered_is_copied_all_the_same(
    why: str,
    snapshots: Snapshots[Snapshot],
    runtime: PlayedRuntime,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if why == "refused":
        runtime.answer = 801
    elif why == "no such call":
        monkeypatch.setattr(torch.cuda, "cudart", lambda: object())
    else:
        monkeypatch.undo()  # The real torch of this machine, which has none, and no streams.
        if torch.cuda.is_available():
            pytest.skip("there is CUDA here")
        mapped = MappedFile(snapshots._folder / "one", 100)
        mapped.register(torch.device("cuda", 0))
        mapped.close()
        return
    for step in range(4):
        content = {"w": torch.full((5000,), float(step))}
        assert torch.equal(read(snapshots, take(snapshots, step, content))["w"], content["w"])
    snapshots.close()
    assert runtime.calls == (["register"] * 2 if why == "refused" else []), "tried once a slot"


def test_memory_that_somebody_empties_is_made_again(tmp_path: Path) -> None:
    """As systemd-logind does with /dev/shm when the user logs out (RemoveIPC)."""
    folder = tmp_path / "a" / "b"
    snapshots = Snapshots(folder, 0, Snapshot, every=1)
    kept = [take(snapshots, step, {"w": torch.full((50,), float(step))}) for step in range(3)]
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()
    folder.parent.rmdir()
    assert snapshots.list_all() == ()
    newest = take(snapshots, 3, {"w": torch.full((50,), 3.0)})
    assert snapshots.list_all() == (newest,)
    assert torch.equal(read(snapshots, newest)["w"], torch.full((50,), 3.0))
    with pytest.raises(Broken):
        read(snapshots, kept[-1])


def test_a_snapshot_whose_tensors_are_gone_is_not_found_again(tmp_path: Path) -> None:
    snapshots = Snapshots(tmp_path / "a" / "b", 0, Snapshot, every=1)
    newest = take(snapshots, 1, {"w": torch.ones(50)})
    for path in (tmp_path / "a" / "b").glob("m0-?"):
        path.unlink()
    with pytest.raises(Broken, match="damaged"):
        read(snapshots, newest)
    assert snapshots.list_all() == ()
    newest = take(snapshots, 2, {"w": torch.zeros(50)})
    assert torch.equal(read(snapshots, newest)["w"], torch.zeros(50))


def put_other_weights(weights: Tensor) -> Tensor:
    """Change weights as torch does not count it; return what they were."""
    before = weights.clone()
    weights.data.fill_(-1.0)
    return before


@pytest.mark.parametrize("before", [0, 1, 3])
def test_weights_that_are_changed_for_a_moment_are_in_no_snapshot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: int
) -> None:
    """A script evaluates averaged weights between two steps. `before`: sound snapshots."""
    snapshots = Snapshots(tmp_path / "a" / "b", 0, Snapshot, every=1)
    weights = torch.arange(5000.0)
    kept = [take(snapshots, step, {"w": weights}) for step in range(before)]
    real, go = Copy.make, threading.Event()

    def make(copy: Copy) -> None:
        assert go.wait(PATIENCE_S)
        real(copy)

    with monkeypatch.context() as held:
        held.setattr(Copy, "make", make)
        snapshots.take(Snapshot(9, 0, Shard(0, 1), 0), {"w": weights}, (0, 1))
        known = put_other_weights(weights)
        go.set()
        assert snapshots._copy.made.wait(PATIENCE_S)
        weights.data.copy_(known)
        assert snapshots.list_all() == tuple(kept[-1:])
    assert "no snapshot of step 9: tensor 0, of shape [5000], was changed" in snapshots.error
    snapshots.take(newest := Snapshot(10, 0, Shard(0, 1), 0), {"w": weights}, (0, 1))
    put_other_weights(weights)  # Too late: it was copied at once.
    assert snapshots.list_all() == (*kept[-1:], newest)
    assert torch.equal(read(snapshots, newest)["w"], known)


def test_a_snapshot_that_is_late_is_thrown_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshots = Snapshots(tmp_path / "a" / "b", 0, Snapshot, every=1)
    real, go = Copy.make, threading.Event()

    def make(copy: Copy) -> None:
        assert go.wait(PATIENCE_S)
        real(copy)

    with monkeypatch.context() as held:
        held.setattr(Copy, "make", make)
        held.setattr(copying, "DEADLINE_S", 0.1)
        snapshots.take(Snapshot(1, 0, Shard(0, 1), 0), {"w": torch.ones(50)}, (0, 1))
        snapshots.wait()
    go.set()
    snapshots.finish()
    assert "not made within" in snapshots.error
    assert snapshots.list_all() == ()
    take(snapshots, 2, {"w": torch.ones(50)})
