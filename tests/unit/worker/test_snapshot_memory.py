"""Neighbours' snapshots of a device's state: their memory is registered while it is mapped."""

import contextlib
import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.played_device import PlayedDevice

from perdure.plan.elastic.shards import Snapshot
from perdure.worker.elastic.mapped import MappedFile
from perdure.worker.elastic.snapshots import Snapshots


class PlayedRuntime:
    """CUDA's runtime, which knows what is registered and whether it is mapped."""

    def __init__(self) -> None:
        self.registered: dict[int, int] = {}
        self.calls: list[str] = []
        self.answer = 0

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:  # noqa: N802
        assert is_mapped(address)
        assert not self.registered.keys() & {address}
        self.calls.append("register")
        if self.answer == 0:
            self.registered[address] = size
        return self.answer

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
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


def make_snapshots(folder: Path, device: PlayedDevice) -> Snapshots[Snapshot]:
    folder.mkdir(exist_ok=True)
    return Snapshots(folder / "a" / "b", 0, Snapshot, every=1, device=device)


def take(snapshots: Snapshots[Snapshot], step: int, content: Any) -> None:
    snapshots.take(Snapshot(step, 1, 0), content, (0,))
    snapshots.finish()
    assert snapshots.error == ""
