"""A slow rank or a sick device is an incident only if the policy ends the world for it."""

import pytest
from tests.decider import feed

from perdure.model.events import (
    Decision,
    GenerationStepping,
    JobSubmitted,
    JournalEntry,
    RanksStarted,
    VerdictReached,
)
from perdure.model.job import JobSpec
from perdure.model.verdicts import Culprit, Verdict
from perdure.telemetry.accounting.history import History
from perdure.telemetry.accounting.incidents import name_state


@pytest.mark.parametrize("kind", ["Straggler", "CommSlow", "UnhealthyDevice"])
@pytest.mark.parametrize(("action", "state"), [("", "running"), ("AssignNodes", "recovering")])
def test_what_is_only_reported_is_no_incident(kind: str, action: str, state: str) -> None:
    verdict = Verdict(
        kind=kind,  # type: ignore[arg-type]
        culprit=Culprit(node=0), generation=0, first_seen_s=8.0, confirmed_s=9.0,
        confidence=0.9, reason="r", actionable=True,
    )  # fmt: skip
    bodies = [
        (1.0, JobSubmitted(spec=JobSpec(script="x"), at_s=1.0)),
        (2.0, RanksStarted(node=0, generation=0, pids={0: 5}, at_s=2.0, warm=True)),
        (3.0, GenerationStepping(generation=0, at_s=3.0)),
        (9.0, VerdictReached(verdict=verdict)),
    ]
    bodies += [(9.0, Decision(action=action, summary="s", reason="r"))] if action else []
    bodies += [(12.0, Decision(action="AssignNodes", summary="again", reason="r"))]
    history = History()
    for seq, (at_s, body) in enumerate(bodies, 1):
        feed(history, JournalEntry(seq=seq, at_s=at_s, body=body))
    assert name_state(history) == state
