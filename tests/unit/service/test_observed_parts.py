"""`--observe` outside the controller: what parts and ranks would do by themselves, and do not."""

import pytest

from perdure.model.actions import FenceAbort
from perdure.model.job import JobSpec, PreemptionConfig, TorchftConfig
from perdure.service.agent_notices import may_acknowledge
from perdure.service.lighthouse import make_stock_words
from perdure.worker.replica import Replica


@pytest.mark.parametrize("observe", [False, True])
def test_a_platform_is_not_told_that_a_machine_may_go(observe: bool) -> None:
    preemption = PreemptionConfig(acknowledge=True)
    spec = JobSpec(script="x.py", preemption=preemption, observe=observe)
    assert may_acknowledge(spec) is not observe


@pytest.mark.parametrize("observe", [False, True])
def test_torchfts_own_lighthouse_has_its_own_time_outs(observe: bool) -> None:
    torchft = TorchftConfig(replicas=2, lighthouse="stock", silent_s=0.5)
    words = make_stock_words(JobSpec(script="x.py", torchft=torchft, observe=observe), 7)
    assert words[:4] == ["--bind", "127.0.0.1:7", "--min_replicas", "1"]
    assert words[4:] == ([] if observe else ["--heartbeat_timeout_ms", "1000"])


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
    replica.take_fence(FenceAbort(quorum_id=7, groups=(0,), reason="r"))
    replica.break_up(8)  # Its own Manager has met an error.
    assert broken == ([] if observed else [7, 8])
