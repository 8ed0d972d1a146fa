"""T3: what is too large for a message is cut in its free texts, and says so."""

import pytest

from perdure.model.codec import encode
from perdure.model.events import (
    AnyEvent,
    MetricsLogged,
    NodeRegistered,
    RankExited,
    StacksTaken,
    VerdictReached,
)
from perdure.model.failures import ExitRecord
from perdure.model.fitting import cut_text, fit_event
from perdure.model.signals.progress import RankAccount
from perdure.model.verdicts import Culprit, Verdict

BIG = "begins here " + "x\n\x1b" * 100_000 + " ends here"
RECORD = ExitRecord(
    rank=1, generation=0, pid=7, at_s=1.0, code=1, error=BIG, traceback=BIG, last_output=(BIG,) * 20
)
FACTS: list[AnyEvent] = [
    RankExited(node=0, record=RECORD, account=RankAccount(), detected_s=1.0),
    StacksTaken(generation=0, at_s=1.0, stacks=dict.fromkeys(range(8), BIG)),
    VerdictReached(
        verdict=Verdict(
            kind="Crash", culprit=Culprit(rank=1), reason=BIG, confidence=1.0,
            first_seen_s=1.0, confirmed_s=1.0, generation=0,
            evidence={"list": ["short"] * 1_000_000, "dict": {str(n): n for n in range(100_000)}},
        )
    ),
]  # fmt: skip


@pytest.mark.parametrize("event", FACTS, ids=lambda event: type(event).__name__)
@pytest.mark.parametrize("limit", [60_000, 1_000_000])
def test_a_fact_is_cut_and_stays_one(event: AnyEvent, limit: int) -> None:
    fitting = fit_event(event, limit)
    assert fitting is not None
    assert type(fitting) is type(event)
    data = encode(fitting)
    assert len(data) <= limit
    assert b"characters, cut]" in data
    if isinstance(fitting, RankExited):
        record = fitting.record
        assert (record.rank, record.pid, record.code) == (1, 7, 1)
        assert record.error.startswith("begins here")
        assert record.error.endswith("ends here")


def test_what_fits_is_left_alone() -> None:
    event = NodeRegistered(node=0, incarnation="a" * 5000, host="h", boot_id="b", slots=1)
    assert fit_event(event, 10_000) is event


def test_metrics_are_dropped_and_counted() -> None:
    rows = tuple((step, {"loss": 1.0, "lr": 2.0}) for step in range(5000))
    thin = fit_event(MetricsLogged(generation=0, rows=rows, dropped=7), 1000)
    assert thin == MetricsLogged(generation=0, rows=(), dropped=10_007)


def test_what_has_no_texts_to_cut_is_told_so() -> None:
    event = NodeRegistered(
        node=0, incarnation="a", host="h", boot_id="b", slots=1, running=tuple(range(100_000))
    )
    assert fit_event(event, 60_000) is None


def test_a_cut_text_is_bounded_and_encodable() -> None:
    text = cut_text("\udcff" + "a" * 100, 60)
    assert len(text) < 80
    assert "101 characters, cut" in text
    assert cut_text("\udcff", 60) == "\\udcff"
