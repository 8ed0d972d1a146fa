"""Verdict, history and budget in, decision with its reason out."""

from perdure.policy.checkpointing import decide_checkpoint_interval
from perdure.policy.preemption import HandOver, Outlook, decide_hand_over
from perdure.policy.recovery import (
    Decision,
    Failure,
    FailureLog,
    SlotEnd,
    decide_recovery,
    decide_slot,
    trim_ends,
)
from perdure.policy.response import (
    Reaction,
    Situation,
    estimate_restart_cost_s,
    find_device_error,
    react,
)

__all__ = [
    "Decision",
    "Failure",
    "FailureLog",
    "HandOver",
    "Outlook",
    "Reaction",
    "Situation",
    "SlotEnd",
    "decide_checkpoint_interval",
    "decide_hand_over",
    "decide_recovery",
    "decide_slot",
    "estimate_restart_cost_s",
    "find_device_error",
    "react",
    "trim_ends",
]
