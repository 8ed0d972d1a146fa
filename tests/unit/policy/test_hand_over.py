"""What is done about nodes that are taken away, by what the job could do without them."""

from typing import Any

import pytest

from perdure.model.job import PreemptionConfig
from perdure.policy import Outlook, decide_hand_over


@pytest.mark.parametrize(
    ("way", "outlook"),
    [
        ("drain", {"spares": 1, "short": 1}),
        ("evict", {"spares": 1, "short": 1, "grace_s": 0.0}),
        ("checkpoint", {"spares": 0, "short": 1}),
        ("evict", {"saves": False, "spares": 1, "short": 1}),
        ("mark", {"saves": False, "spares": 0, "short": 1}),
        ("end", {"saves": False, "handles": True, "spares": 0, "short": 1}),
        ("evict", {"saves": False, "handles": True, "spares": 1, "short": 1}),
        ("mark", {"saves": False, "handles": True, "spares": 0, "short": 1, "grace_s": 0.0}),
        ("drain", {"spares": 0, "short": 1, "left": 3}),
        ("checkpoint", {"spares": 0, "short": 1, "left": 0}),
        ("drain", {"short": 1, "left": 1}),
    ],
)
def test_what_is_certain_is_left_wherever_it_can_be(way: str, outlook: dict[str, Any]) -> None:
    known: dict[str, Any] = {"grace_s": 30.0}
    assert decide_hand_over(Outlook(**(known | outlook)), PreemptionConfig()).way == way


@pytest.mark.parametrize(
    ("way", "rebalance", "outlook"),
    [
        ("drain", "drain", {"spares": 1, "short": 1}),
        ("checkpoint", "drain", {"spares": 0, "short": 1}),
        ("checkpoint", "checkpoint", {"spares": 1, "short": 1}),
        ("mark", "report", {"spares": 1, "short": 1}),
        ("mark", "drain", {"spares": 1, "short": 1, "left": None, "saves": False}),
        ("mark", "checkpoint", {"short": 1, "left": None, "saves": False, "handles": True}),
    ],
)
def test_a_risk_is_worth_no_smaller_world(way: str, rebalance: Any, outlook: Any) -> None:
    known = {"grace_s": 0.0, "certain": False, "left": 3}
    config = PreemptionConfig(rebalance=rebalance)
    assert decide_hand_over(Outlook(**(known | outlook)), config).way == way
