"""Accounts of a rank of a replica group: every moment in one of them."""

from pathlib import Path
from typing import Any

import pytest

from perdure.adapters.rings import read_ring
from perdure.worker.ring import RingWriter
from perdure.worker.torchft import manager as replica_account
from perdure.worker.torchft.manager import ReplicaAccount


class Rank:
    """Stands for a Manager, at a time of its own."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.step, self._quorum_id = 1_000_000_000_000, 0, 7
        monkeypatch.setattr(replica_account.time, "monotonic_ns", lambda: self.now)
        self.path = str(folder / "ring")
        self.account = ReplicaAccount()
        self.account.begin(RingWriter.create(self.path, rank=0, generation=0), 0)

    def current_step(self) -> int:
        return self.step

    def attempt(
        self,
        seconds: float,
        *,
        wait: float = 0,
        gate: float = 0,
        ok: bool = True,
        heal: bool = False,
    ) -> None:
        self.account.add_gate(int(gate * 1e9))
        begin = self.account.begin_wait()
        inner = self.account.begin_wait()  # It is asked for again while it is waited for.
        self.now += int(wait * 1e9)
        self.account.end_wait(inner)
        self.account.end_wait(begin)
        self.now += int((seconds - wait) * 1e9)
        self.step += ok
        self.account.end_attempt(self, committed=ok, healing=heal)

    def read(self) -> Any:
        return read_ring(self.path, 0.0).account


def test_every_moment_since_the_first_quorum_is_in_one_account(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = Rank(tmp_path, monkeypatch)
    rank.attempt(0.5)  # No quorum was seen: counted from its end on.
    rank.now += 1_000_000_000
    for _ in range(4):
        rank.attempt(0.25, wait=0.1)  # Steady: a part of the step.
    rank.attempt(2.0, ok=False)
    rank._quorum_id = 8
    rank.attempt(1.0, wait=0.75, gate=0.125)
    rank.attempt(3.0, heal=True)
    account = rank.read()
    assert account.step == rank.step
    assert account.lost_s == pytest.approx(2.0)
    assert account.reform_s == pytest.approx(0.75)
    assert account.boundary_s == pytest.approx(0.125)
    assert account.heal_s == pytest.approx(3.0)
    assert account.step_s == pytest.approx(1.0 + 4 * 0.25 + 0.125)
    total = account.step_s + account.lost_s + account.reform_s + account.heal_s
    total += account.boundary_s
    assert total == pytest.approx(account.last_step_s - account.first_step_s)
    assert account.marks == ()


def test_time_before_the_first_quorum_is_not_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = Rank(tmp_path, monkeypatch)
    rank.account.add_gate(10**9)
    begin = rank.account.begin_wait()
    rank.now += 5_000_000_000
    rank.account.note_quorum()
    rank.now += 1_000_000_000
    rank.account.end_wait(begin)
    rank.step = 1
    rank.account.end_attempt(rank, committed=True, healing=False)
    account = rank.read()
    assert account.heal_s == pytest.approx(1.0), "the first step is start-up"
    assert (account.step_s, account.boundary_s) == (0.0, 0.0)
    assert account.last_step_s - account.first_step_s == pytest.approx(1.0)
