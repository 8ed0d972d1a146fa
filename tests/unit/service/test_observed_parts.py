"""`--observe` outside the controller: what parts and ranks would do by themselves, and do not."""

from datetime import timedelta

import pytest

from perdure.model.events import AnyEvent, ReplicaWaiting
from perdure.model.job import JobSpec, PreemptionConfig, TorchftConfig
from perdure.worker.torchft.manager import Replica


@pytest.mark.parametrize("observe", [False, True])
def test_a_platform_is_not_told_that_a_machine_may_go(observe: bool) -> None:
    preemption = PreemptionConfig(acknowledge=True)
    spec = JobSpec(script="x.py", preemption=preemption, observe=observe)
    assert spec.unordered.acknowledges is not observe


@pytest.mark.parametrize("observe", [False, True])
def test_torchfts_own_lighthouse_has_its_own_time_outs(observe: bool) -> None:
    torchft = TorchftConfig(replicas=2, lighthouse="stock", silent_s=0.5)
    lighthouse = JobSpec(script="x.py", torchft=torchft, observe=observe).lighthouse
    assert lighthouse is not None
    words = lighthouse.stock_words
    assert words[:2] == ("--min_replicas", "1")
    assert words[2:] == (() if observe else ("--heartbeat_timeout_ms", "1000"))


class Stand:
    """Stands for a Manager and its process group, and for a ring."""

    _quorum_id, _timeout, rank, generation = 4, timedelta(seconds=60), 1, 3

    @property
    def _pg(self) -> "Stand":
        return self

    def current_step(self) -> int:
        return 7


@pytest.mark.parametrize("tells", [False, True])
def test_a_wait_for_a_quorum_is_told_of_where_the_lighthouse_is_torchfts(tells: bool) -> None:
    told: list[AnyEvent] = []
    now = [100.0]
    replica, stand = Replica(), Stand()
    replica.join(stand, told.append, lambda: now[0], tells_quorums=tells)  # type: ignore[arg-type]
    replica._manager = lambda: stand
    assert replica.begin_quorum_wait() is tells
    assert not replica.begin_quorum_wait(), "it is asked for within another wait"
    for _ in range(3):
        now[0] += 0.4
        replica._look()
    if tells:
        replica.end_quorum_wait(well=True)
    expected = [(100.0, 60.0, False), (100.0, 60.0, True)] if tells else []
    waits = [e for e in told if isinstance(e, ReplicaWaiting)]
    assert [(e.since_s, e.timeout_s, e.over) for e in waits] == expected


@pytest.mark.parametrize("observed", [False, True])
def test_a_replica_breaks_no_connection(observed: bool) -> None:
    broken: list[int] = []

    class Fences:
        def break_up(self, quorum_id: int) -> int:
            broken.append(quorum_id)
            return 1

    replica = Replica()
    replica.fences = Fences()  # type: ignore[assignment]
    replica.join(None, lambda event: None, lambda: 0.0, observed=observed)  # type: ignore[arg-type]
    replica.break_up(7)
    replica.break_up(8)  # Its own Manager has met an error.
    assert broken == ([] if observed else [7, 8])
